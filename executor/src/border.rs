//! Where a chunk takes over from another: the stream and its gradient, between two ranks or on one.

use ir::schedule::Action;
use ir::sharding::Sharding;
use ndarray::{ArrayD, IxDyn};

use crate::convert::{Subject, convert, elements};
use crate::error::ExecutorError;
use crate::fabric::RankComm;
use crate::instruction::Tag;
use crate::kernels::{Real, Tensor};
use crate::label::{Class, Phase};
use crate::lifetimes::{Direction, Held};
use crate::prepare::unfit;
use crate::rank::Rank;
use crate::ways::Border;

impl<E: Real> Rank<'_, E> {
    /// A stream that a layer reads, in the sharding in which it reads it.
    pub(crate) fn receive_stream(
        &mut self,
        comm: &mut RankComm<'_, E>,
        way: (usize, Action),
        seq: u64,
    ) -> Result<Tensor<E>, ExecutorError> {
        let run = self.run;
        let border = &run.ways.borders[way.0];
        let from = self.run.stage_at(border.chunks[0], way.1.micro_batch);
        let key = (way.0, Direction::Forward, self.run.unit_of(seq));
        let stream = self.receive(comm, (from, border, border.sent), key, seq)?;
        self.at_border(comm, border, (Phase::Forward, seq), stream)
    }

    /// A stream that a layer leaves.
    pub(crate) fn send_stream(
        &mut self,
        comm: &mut RankComm<'_, E>,
        way: (usize, Action),
        (seq, stream): (u64, Tensor<E>),
    ) -> Result<(), ExecutorError> {
        let run = self.run;
        let border = &run.ways.borders[way.0];
        let to = self.run.stage_at(border.chunks[1], way.1.micro_batch);
        let key = (way.0, Direction::Forward, self.run.unit_of(seq));
        self.send(comm, (to, border), key, (seq, stream))
    }

    /// The gradient of a stream that a layer has left.
    pub(crate) fn receive_gradient(
        &mut self,
        comm: &mut RankComm<'_, E>,
        way: (usize, Action),
        seq: u64,
    ) -> Result<Tensor<E>, ExecutorError> {
        let run = self.run;
        let border = &run.ways.borders[way.0];
        let from = self.run.stage_at(border.chunks[1], way.1.micro_batch);
        let key = (way.0, Direction::Backward, self.run.unit_of(seq));
        self.receive(comm, (from, border, border.gradient), key, seq)
    }

    /// The gradient of a stream that a layer has read.
    pub(crate) fn send_gradient(
        &mut self,
        comm: &mut RankComm<'_, E>,
        way: (usize, Action),
        (seq, gradient): (u64, Tensor<E>),
    ) -> Result<(), ExecutorError> {
        let run = self.run;
        let border = &run.ways.borders[way.0];
        let gradient = self.at_border(comm, border, (Phase::Backward, seq), gradient)?;
        let to = self.run.stage_at(border.chunks[0], way.1.micro_batch);
        let key = (way.0, Direction::Backward, self.run.unit_of(seq));
        self.send(comm, (to, border), key, (seq, gradient))
    }

    /// The loss of a micro-batch, added to that of its step.
    pub(crate) fn add_loss(&mut self, loss: &Tensor<E>) {
        let loss = loss.sum().wide();
        self.record.losses.last_mut().into_iter().for_each(|total| *total += loss);
    }

    /// The gradient of the loss: every token that counts in a step weighs the same.
    pub(crate) fn loss_gradient(&self, seq: u64) -> Tensor<E> {
        let step = seq / u64::from(self.run.execution.shape().n_units());
        let share = (self.run.n_counted(step) as f64).recip();
        ArrayD::from_elem(IxDyn(&[]), E::from_f64(share))
    }

    /// Converts the stream, or its gradient, where two chunks have it in different shardings.
    fn at_border(
        &self,
        comm: &mut RankComm<'_, E>,
        border: &Border,
        (phase, seq): (Phase, u64),
        tensor: Tensor<E>,
    ) -> Result<Tensor<E>, ExecutorError> {
        let steps = if phase == Phase::Forward { &border.forward } else { &border.backward };
        let name = format!("{}, converted", self.stream_name(border));
        let tag = self.run.place(border.link.to, phase, seq).tag(Class::Pipeline, &name);
        convert(comm, &self.seat, steps, &Subject { tag, shape: self.run.border_shape(border, seq) }, tensor)
    }

    fn send(
        &mut self,
        comm: &mut RankComm<'_, E>,
        (to, border): (u32, &Border),
        key: (usize, Direction, u32),
        (seq, tensor): (u64, Tensor<E>),
    ) -> Result<(), ExecutorError> {
        if to == self.seat.stage {
            return self.memory.put_tensor(Held::Stream(key.0, key.1, key.2), &tensor, self.run.rounded());
        }
        let tag = self.border_tag(border, key.1, seq);
        let Some((handover, parts)) = border.parts(key.1, self.run.slice_of(seq)) else {
            return comm.send(self.seat.peer(to), tag, elements(tensor));
        };
        let sharding = if key.1 == Direction::Forward { border.sent } else { handover.left };
        let own = self.seat.block(sharding, self.run.border_shape(border, seq));
        for part in parts.iter().filter(|part| part.from == self.seat.device) {
            let to = (self.seat.first(to) + part.to) as usize;
            comm.send(to, tag.clone(), elements(own.cut(&tensor, &part.block)))?;
        }
        Ok(())
    }

    fn receive(
        &mut self,
        comm: &mut RankComm<'_, E>,
        (from, border, sharding): (u32, &Border, Sharding),
        key: (usize, Direction, u32),
        seq: u64,
    ) -> Result<Tensor<E>, ExecutorError> {
        let missing = || unfit(format!("chunk {} has not received its stream", border.chunks[1]));
        if from == self.seat.stage {
            return self.memory.take(Held::Stream(key.0, key.1, key.2)).ok_or_else(missing);
        }
        let (shape, tag) = (self.run.border_shape(border, seq), self.border_tag(border, key.1, seq));
        let Some((handover, parts)) = border.parts(key.1, self.run.slice_of(seq)) else {
            let block = self.seat.block(sharding, shape);
            let data = comm.recv(self.seat.peer(from), tag, block.len())?;
            return ArrayD::from_shape_vec(IxDyn(&block.shape()), data).map_err(|_| missing());
        };
        let sharding = if key.1 == Direction::Forward { handover.read } else { border.gradient };
        let block = self.seat.block(sharding, shape);
        let mut tensor = ArrayD::zeros(IxDyn(&block.shape()));
        for part in parts.iter().filter(|part| part.to == self.seat.device) {
            let from = (self.seat.first(from) + part.from) as usize;
            block.paste(&mut tensor, &part.block, comm.recv(from, tag.clone(), part.block.len())?);
        }
        Ok(tensor)
    }

    fn border_tag(&self, border: &Border, direction: Direction, seq: u64) -> Tag {
        let phase = match direction {
            Direction::Forward => Phase::Forward,
            Direction::Backward => Phase::Backward,
        };
        self.run.place(border.link.to, phase, seq).tag(Class::Pipeline, &self.stream_name(border))
    }

    /// Of several streams that a layer reads each has a name of its own: their messages may cross.
    fn stream_name(&self, border: &Border) -> String {
        let to = border.link.to;
        match self.run.layer(to).stream_in.as_slice() {
            [] | [_] => "the stream".into(),
            several => {
                let name = several.get(border.link.read).map_or("", |&read| self.run.tensor_name(to, read));
                format!("the stream {name}")
            }
        }
    }
}
