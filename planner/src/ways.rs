//! The steps of conversions, worked out once: no mesh changes them, and every mesh asks for the same ones.

use std::cell::RefCell;
use std::collections::BTreeMap;

use ir::conversion::{Change, changes};
use ir::sharding::Sharding;

/// By the codes of two shardings, what lies between them; `None` where there is no way.
type Ways = BTreeMap<(u32, u32), Option<Box<[Change]>>>;

thread_local! {
    /// A few ten thousand ways in the largest searches: some megabytes a thread.
    static WAYS: RefCell<Ways> = const { RefCell::new(Ways::new()) };
}

/// Tells the steps from one sharding to another, as [`changes`] does.
pub(crate) fn ways(from: Sharding, to: Sharding, tell: impl FnMut(Change)) -> Option<()> {
    WAYS.with_borrow_mut(|known| {
        let way = known.entry((from.code(), to.code())).or_insert_with(|| {
            let mut list = Vec::new();
            changes(from, to, |change| list.push(change))?;
            Some(list.into())
        });
        way.as_ref().map(|way| way.iter().copied().for_each(tell))
    })
}
