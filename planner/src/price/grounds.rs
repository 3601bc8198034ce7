//! The machines under the stages of a pipeline, where the groups of a cluster differ.
//!
//! Stages stand one behind the other on the ranks of the cluster. A stage that lies on one group is priced on its
//! device and links and has its memory; one that lies on several waits for the slowest, has the memory of the smallest
//! and the links of the cluster, as what goes from stage to stage has.

use std::ops::Range;

use ir::mesh::{Mesh, Meshes};
use ir::schedule::Placement;

use crate::price::setting::Setting;

/// What the stages of a pipeline stand on.
#[derive(Clone, Debug)]
pub struct Grounds<'a> {
    /// Prices on every ground that differs from those before it, in the order of the stages.
    pub settings: Vec<Setting<'a>>,
    /// Per stage, which of them.
    pub of_stage: Vec<usize>,
}

impl<'a> Grounds<'a> {
    /// The grounds of stages on such meshes: of stages on one, the meshes are alike.
    pub fn new(setting: &Setting<'a>, n_stages: u64, meshes: Meshes<'_>) -> Self {
        Self::over(setting, n_stages, (meshes, &|stage| meshes.ranks(stage)))
    }

    /// The same of a part of every stage's devices, by their ranks.
    pub fn over(
        setting: &Setting<'a>,
        n_stages: u64,
        (meshes, ranks): (Meshes<'_>, &dyn Fn(u64) -> Range<u64>),
    ) -> Self {
        let cluster = setting.machine.cluster;
        let mut grounds = Self { settings: Vec::new(), of_stage: Vec::new() };
        let one_mesh = meshes.each.is_empty();
        if one_mesh && !cluster.is_mixed() && cluster.groups.iter().all(|group| group.links.is_empty()) {
            grounds.settings.push(setting.clone());
            grounds.of_stage.resize(n_stages as usize, 0);
            return grounds;
        }
        let links = |home: Option<usize>| home.map(|home| &cluster.groups[home].links);
        for stage in 0..n_stages {
            let own = setting.among(cluster.groups_under(ranks(stage)));
            let same = |(ground, other): (usize, &Setting<'_>)| {
                let mesh = grounds.of_stage.iter().position(|of| *of == ground);
                mesh.is_some_and(|other| meshes.of(other as u64) == meshes.of(stage))
                    && other.machine.device == own.machine.device
                    && other.memory.total_cmp(&own.memory).is_eq()
                    && links(other.machine.home) == links(own.machine.home)
            };
            let known = grounds.settings.iter().enumerate().position(same);
            grounds.of_stage.push(known.unwrap_or(grounds.settings.len()));
            if known.is_none() {
                grounds.settings.push(Setting { ground: grounds.settings.len(), ..own });
            }
        }
        grounds
    }

    /// A stage on a ground.
    pub fn stage_on(&self, ground: usize) -> u64 {
        self.of_stage.iter().position(|of| *of == ground).unwrap_or(0) as u64
    }

    /// The mesh of the stages on a ground.
    pub fn mesh<'m>(&self, meshes: Meshes<'m>, ground: usize) -> &'m Mesh {
        meshes.of(self.stage_on(ground))
    }

    /// Prices on the ground of a stage.
    pub fn at(&self, stage: usize) -> &Setting<'a> {
        &self.settings[self.of_stage[stage]]
    }

    /// The ground that a chunk is priced on: of the stages that hold it, the slowest; ties to the first.
    pub fn of_chunk(&self, placement: Placement, chunk: usize) -> usize {
        if self.settings.len() == 1 {
            return 0;
        }
        let ranks = placement.ranks(self.of_stage.len() as u32, chunk as u32);
        let grounds = ranks.map(|rank| self.of_stage[rank as usize]);
        let rate = |ground: &usize| self.settings[*ground].rate();
        grounds.min_by(|a, b| rate(a).total_cmp(&rate(b))).unwrap_or(0)
    }

    /// Bytes that a plan may use on each device of the stages that hold a chunk.
    pub fn capacity_of_chunk(&self, placement: Placement, chunk: usize) -> f64 {
        let ranks = placement.ranks(self.of_stage.len() as u32, chunk as u32);
        ranks.map(|rank| self.at(rank as usize).capacity).fold(f64::INFINITY, f64::min)
    }
}
