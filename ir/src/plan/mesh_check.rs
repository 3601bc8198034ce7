//! Whether the meshes of a plan make sense: axes with names of their own, no more devices than there are, every entry
//! on one mesh.

use std::collections::BTreeMap;

use crate::mesh::{MAX_AXES, Mesh};
use crate::plan::check::fail;
use crate::plan::{Plan, PlanError};

/// Most devices of a stage: a hundred times the largest machine, and small enough that counts do not overflow.
const MAX_DEVICES: u64 = 1 << 24;

/// A name that can stand in a sharding's text.
pub(super) fn is_tidy(name: &str) -> bool {
    !name.is_empty() && !name.contains(|c: char| c.is_whitespace() || c == ',' || c == '@')
}

/// Checks the axes of all meshes, and that the cluster has as many devices.
pub(super) fn check_mesh(plan: &Plan) -> Result<(), PlanError> {
    let devices = check_axes("mesh", &plan.mesh)?;
    if plan.n_stages == 0 {
        return fail("n_stages", "a plan has at least one stage");
    }
    let used = match plan.stage_meshes.as_slice() {
        [] => devices.checked_mul(plan.n_stages),
        meshes => Some(check_lengths(plan, meshes)?),
    };
    let groups = plan.cluster.groups.iter();
    let have = groups.fold(0_u64, |sum, group| sum.saturating_add(group.count));
    match used {
        Some(used) if used <= have => Ok(()),
        _ => {
            let stages = plan.n_stages;
            fail(
                "n_stages",
                format!("{stages} stages of {devices} devices exceed the cluster's {have} devices"),
            )
        }
    }
}

/// Checks the meshes of the stages, of which each has the plan's axes; their devices.
fn check_lengths(plan: &Plan, meshes: &[Mesh]) -> Result<u64, PlanError> {
    if meshes.len() as u64 != plan.n_stages {
        let what = format!("expected a mesh for each of {} stages, found {}", plan.n_stages, meshes.len());
        return fail("stage_meshes", what);
    }
    let names = |mesh: &Mesh| mesh.axes.iter().map(|axis| axis.name.clone()).collect::<Vec<_>>();
    let mut all = 0_u64;
    for (stage, mesh) in meshes.iter().enumerate() {
        let place = format!("stage_meshes[{stage}]");
        all = all.saturating_add(check_axes(&place, mesh)?);
        if names(mesh) != names(&plan.mesh) {
            let what = format!("expected the axes of `mesh`, {}", names(&plan.mesh).join(" "));
            return fail(format!("{place}.axes"), what);
        }
    }
    if meshes[0] != plan.mesh {
        return fail("stage_meshes[0]", "the first stage has the plan's `mesh`");
    }
    Ok(all)
}

/// Every chunk and every entry is on stages of one mesh.
pub(super) fn check_stage_meshes(plan: &Plan) -> Result<(), PlanError> {
    if plan.stage_meshes.is_empty() {
        return Ok(());
    }
    let mut known: BTreeMap<usize, &Mesh> = BTreeMap::new();
    for (chunk, runs) in plan.chunks.iter().enumerate() {
        let mesh = plan.mesh_of_chunk(chunk);
        if plan.stages_of_chunk(chunk).iter().any(|&stage| plan.mesh_of(stage) != mesh) {
            return fail(format!("chunks[{chunk}]"), "both copies of a chunk are on stages of one mesh");
        }
        for (at, run) in runs.iter().enumerate() {
            if *known.entry(run.entry).or_insert(mesh) != mesh {
                let what =
                    format!("entry {} is on a stage of another mesh too: it needs one of its own", run.entry);
                return fail(format!("chunks[{chunk}][{at}].entry"), what);
            }
        }
    }
    Ok(())
}

/// Checks the axes of a mesh; its devices.
fn check_axes(place: &str, mesh: &Mesh) -> Result<u64, PlanError> {
    let axes = &mesh.axes;
    if axes.len() > MAX_AXES {
        return fail(
            format!("{place}.axes"),
            format!("a mesh has at most {MAX_AXES} axes, found {}", axes.len()),
        );
    }
    let mut devices = 1_u64;
    for (i, axis) in axes.iter().enumerate() {
        if !is_tidy(&axis.name) || axes[..i].iter().any(|other| other.name == axis.name) {
            let what =
                format!("`{}`: an axis needs a name of its own, without spaces, `,` and `@`", axis.name);
            return fail(format!("{place}.axes[{i}].name"), what);
        }
        devices = devices.saturating_mul(axis.size);
        if axis.size == 0 || devices > MAX_DEVICES {
            let what = format!(
                "the mesh must have between 1 and {MAX_DEVICES} devices, found an axis of {}",
                axis.size
            );
            return fail(format!("{place}.axes[{i}].size"), what);
        }
    }
    Ok(devices)
}
