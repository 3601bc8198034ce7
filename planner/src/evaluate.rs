//! How fast a candidate is: choices at rising prices of memory until every number of virtual stages has an arrangement
//! that fits.

use crate::arrange::Arranged;
use crate::bound::Bound;
use crate::candidate::{Candidate, Dropped, Scope};
use crate::chooser::Chooser;
use crate::layer_problem::LayerProblem;
use crate::menu::MEMORY_PRICES;
use crate::prices::Prices;
use crate::shelf::Shelf;

impl Scope<'_> {
    /// Works a candidate out for every number of virtual stages; the fastest that fits.
    ///
    /// # Errors
    /// Why none does.
    pub fn evaluate(&self, candidate: &Candidate, bound: &Bound) -> Result<Arranged, Dropped> {
        let prices = Prices::new(self.machine.clone(), &candidate.shape.mesh, &candidate.shape.rules);
        let sizes = self.sizes(candidate);
        let mut shelf = Shelf::default();
        // Most candidates fit with the fastest choices or nearly so: dearer memory is asked about only when not.
        let fastest = self.problems((candidate, bound), &prices, &sizes, &self.given_fastest());
        let fastest = fastest.ok_or(Dropped::NoStrategy)?;
        let ready = self.choosers(&fastest);
        self.extend(&mut shelf, (&fastest, &ready), (&prices, &sizes), 0.0).ok_or(Dropped::NoStrategy)?;
        if let (Some(found), true) = self.best_of(candidate, &shelf) {
            return Ok(found);
        }
        let free =
            self.problems((candidate, bound), &prices, &sizes, &self.given()).ok_or(Dropped::NoStrategy)?;
        let ready = self.choosers(&free);
        let mut best = None;
        for multiple in &MEMORY_PRICES[1..] {
            let price = multiple * bound.seconds_per_byte;
            self.extend(&mut shelf, (&free, &ready), (&prices, &sizes), price).ok_or(Dropped::NoStrategy)?;
            let (found, all_fit) = self.best_of(candidate, &shelf);
            best = found;
            if all_fit {
                break;
            }
        }
        best.ok_or_else(|| self.overflow(candidate, &self.levels(&shelf)))
    }

    /// The fastest arrangement of what is on the shelf, and whether every number of virtual stages had one.
    fn best_of(&self, candidate: &Candidate, shelf: &Shelf) -> (Option<Arranged>, bool) {
        let levels = self.levels(shelf);
        let mut best: Option<Arranged> = None;
        let mut all = true;
        for v in self.virtual_stages(candidate) {
            match self.arrange(candidate, v, (&levels, shelf)) {
                Some(found) if best.as_ref().is_none_or(|b| found.step_time() < b.step_time()) => {
                    best = Some(found)
                }
                Some(_) => {}
                None => all = false,
            }
        }
        (best, all)
    }

    fn choosers<'s>(&'s self, problems: &'s [LayerProblem<'_>]) -> Vec<Chooser<'s>> {
        problems.iter().map(|one| self.chooser(one)).collect()
    }
}
