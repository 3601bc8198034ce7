//! What hosts hold: planned where nothing fits without it or where it pays, proven, run, explained, and refused where
//! it may not be.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own files has failed")]
#![expect(clippy::disallowed_methods, reason = "plans and clusters are files")]

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tests::{Transcript, planner};

fn asked(words: &str) -> Transcript {
    planner(&words.split_whitespace().collect::<Vec<_>>())
}

#[track_caller]
fn done(words: &str) -> String {
    let transcript = asked(words);
    assert_eq!(transcript.code, 0, "{transcript}");
    transcript.out
}

#[track_caller]
fn refused(words: &str) -> String {
    let transcript = asked(words);
    assert_eq!(transcript.code, 3, "{transcript}");
    transcript.err
}

fn read(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// A file of this run of the tests.
fn fresh(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("offload-{name}"))
}

/// The plan runs right in every precision, moves and holds what was predicted of it, some of everything named, and is
/// proven.
#[track_caller]
fn assert_counted_and_proven(path: &Path, lines: &[&str]) {
    let plan = path.display();
    let verified = done(&format!("verify {plan} --precision all"));
    for line in lines {
        let row = verified.lines().find(|row| row.starts_with(line)).unwrap_or_default();
        assert!(row.ends_with("equal") && !row.contains(" 0  "), "{verified}");
    }
    assert!(done(&format!("prove {plan}")).contains("proven"));
}

const JOB: &str = "llama-3-8b dgx-h100 --devices 1";

#[test]
fn eight_billion_parameters_train_on_one_device_whose_host_updates() {
    let path = fresh("one.json");
    let plan = path.display();
    let report = done(&format!("optimize {JOB} --pin offload=optimizer -o {plan}"));
    assert!(report.contains("optimizer on the host"), "{report}");
    let found = read(&path);
    let stage = &found["predicted"]["stages"][0];
    // An fp32 value, two moments and an fp32 gradient of every parameter.
    let n = 8_030_261_248.0;
    assert_eq!(stage["host_memory_bytes"].as_f64(), Some(16.0 * n));
    assert_eq!(stage["memory"]["optimizer"].as_f64(), Some(0.0));
    // At 0.8 of 63 GB/s down and up, and 4e9 parameters a second between.
    let expected = n * (4.0 + 2.0) / (0.8 * 63e9) + n / 4e9;
    let offload = found["predicted"]["breakdown"]["offload_s"].as_f64().unwrap();
    assert!((offload / expected - 1.0).abs() < 1e-9, "{offload} {expected}");

    assert_counted_and_proven(
        &path,
        &["gradients to the host", "parameters from the host", "arenas on the hosts"],
    );
    let explained = done(&format!("explain {plan} --why-not offload=none"));
    assert!(explained.contains("offload=none does not fit"), "{explained}");
}

/// Without a word its host has what pays there: parameters too, which are fetched behind the work of other layers.
#[test]
fn where_nothing_fits_hosts_have_what_pays() {
    let of = |words: &str| -> Value {
        serde_json::from_str(&done(&format!("optimize {JOB} --json {words}"))).unwrap()
    };
    let (free, optimizer) = (of(""), of("--pin offload=optimizer"));
    let warnings = free["warnings"].to_string();
    let said = "no plan fits in the devices' memory alone: hosts hold optimizer states, which they update; parameters between uses";
    assert!(warnings.contains(said), "{warnings}");
    let of_parameters = |plan: &Value| plan["roles"].get("parameters_on_host").is_some();
    assert!(of_parameters(&free) && !of_parameters(&optimizer));
    let time = |plan: &Value| plan["predicted"]["step_time_s"].as_f64().unwrap();
    assert!(time(&free) < 0.99 * time(&optimizer), "{} {}", time(&free), time(&optimizer));
}

/// Where all micro-batches are in flight, no host holds what layers keep: then they keep less there.
#[test]
fn hosts_that_cannot_hold_all_that_is_kept_hold_what_must_be() {
    let job = "llama-3-8b dgx-h100";
    let of = |words: &str| -> Value {
        serde_json::from_str(&done(&format!("optimize {job} --json --pin schedule=gpipe,pp=4{words}")))
            .unwrap()
    };
    let (free, full) = (of(""), of(",recompute=full,offload=activations"));
    let time = |plan: &Value| plan["predicted"]["step_time_s"].as_f64().unwrap();
    let bound = |plan: &Value| plan["search"]["lower_bound_s"].as_f64().unwrap();
    // The second is among the plans that the first was chosen from.
    assert!(
        bound(&free) <= time(&full) && time(&free) < 1.1 * time(&full),
        "{} {}",
        time(&free),
        time(&full)
    );
    let allowed = of(",recompute=full,offload=allowed");
    assert!(bound(&allowed) <= time(&full), "{} {}", bound(&allowed), time(&full));
}

/// Long sequences compute long enough to hide their way to the host: nothing is computed again any more.
#[test]
fn activations_of_long_sequences_hide_on_their_way_to_the_host() {
    let job = "llama-3-8b dgx-h100 --devices 8 --seq-len 131072 --global-batch 32";
    let path = fresh("long.json");
    let plan = path.display();
    let plain: Value = serde_json::from_str(&done(&format!("optimize {job} --json"))).unwrap();
    let report = done(&format!("optimize {job} --pin offload=activations -o {plan}"));
    assert!(report.contains("activations on the host, recompute none"), "{report}");
    let found = read(&path);
    let time = |plan: &Value| plan["predicted"]["step_time_s"].as_f64().unwrap();
    assert!(plain["predicted"]["breakdown"]["recompute_s"].as_f64().unwrap() > 0.0);
    assert!(time(&found) < 0.99 * time(&plain), "{} {}", time(&found), time(&plain));
    // Between embedding and head every layer keeps what it keeps there, and only these.
    let homes = |entry: &Value| (entry["layer"] == "decoder", entry["kept_home"] == "host");
    let entries = found["entries"].as_array().unwrap();
    assert!(entries.iter().map(homes).all(|(decoder, host)| decoder == host), "{entries:?}");
    assert!(found["predicted"]["stages"][0]["host_memory_bytes"].as_f64().unwrap() > 0.0);

    assert_counted_and_proven(
        &path,
        &["activations to the host", "activations from the host", "arenas on the hosts"],
    );
    let explained = done(&format!("explain {plan}"));
    assert!(explained.contains("is fetched before its backward"), "{explained}");
    let compared = done(&format!("explain {plan} --why-not offload=none"));
    let row = compared.lines().find(|row| row.starts_with("activations on the host")).unwrap_or_default();
    assert_eq!(row.split_whitespace().skip(4).collect::<Vec<_>>(), ["all", "none"], "{compared}");
}

/// Optimizer states and parameters on the host (ZeRO-Infinity): bytes by formula, in the plan's figures and in its run.
#[test]
fn parameters_are_fetched_for_every_use() {
    let path = fresh("states.json");
    let plan = path.display();
    let report = done(&format!("optimize {JOB} --pin offload=states -o {plan}"));
    assert!(report.contains("optimizer on the host, parameters on the host"), "{report}");
    let found = read(&path);
    let stage = &found["predicted"]["stages"][0];
    // Beside 16 bytes of every parameter two more of all but embedding and head, whose parameters stay.
    let (n, ends) = (8_030_261_248.0, 128_256.0 * 4096.0 * 2.0 + 4096.0);
    assert_eq!(stage["host_memory_bytes"].as_f64(), Some(16.0 * n + 2.0 * (n - ends)));
    let resident = stage["memory"]["parameters"].as_f64().unwrap();
    assert_eq!(resident, 2.0 * ends);
    // New values go down once more, at 0.8 of 63 GB/s.
    let expected = (n * (4.0 + 2.0) + 2.0 * (n - ends)) / (0.8 * 63e9) + n / 4e9;
    let offload = found["predicted"]["breakdown"]["offload_s"].as_f64().unwrap();
    assert!((offload / expected - 1.0).abs() < 1e-9, "{offload} {expected}");

    assert_counted_and_proven(
        &path,
        &["parameters from the host, for a use", "new parameters to the host", "arenas on the hosts"],
    );
    let explained = done(&format!("explain {plan}"));
    assert!(
        explained.contains("are fetched for every use") && !explained.contains("does not fit"),
        "{explained}"
    );
    // On hosts with a sixteenth of the memory it is explained too, and said not to fit.
    let mut file = read(&path);
    let memory = &mut file["cluster"]["groups"][0]["host_memory_bytes"];
    *memory = (memory.as_f64().unwrap() / 16.0).into();
    let small = fresh("states-small-host.json");
    std::fs::write(&small, file.to_string()).unwrap();
    let explained = done(&format!("explain {}", small.display()));
    assert!(
        explained.contains("states and activations in the memory of its node's host.\nIt does not fit."),
        "{explained}"
    );
}

/// Where the link is slower than the layers, what shows of it is told.
#[test]
fn a_slow_link_shows() {
    let path = fresh("slow.json");
    let plan = path.display();
    done(&format!("optimize {JOB} --pin offload=both --pin recompute=none -o {plan}"));
    let breakdown = &read(&path)["predicted"]["breakdown"];
    let shows = breakdown["host_links_s"].as_f64().unwrap();
    assert!(shows > breakdown["compute_forward_s"].as_f64().unwrap(), "{breakdown}");
    let explained = done(&format!("explain {plan}"));
    assert!(explained.contains("hosts' links, beyond layers"), "{explained}");
    assert!(explained.contains("link to the host"), "{explained}");
}

#[test]
fn what_is_forbidden_of_hosts_stays_on_the_devices() {
    let of = |words: &str| -> Value {
        let job = format!("{JOB} --pin micro-batch=2 --pin offload=allowed");
        serde_json::from_str(&done(&format!("optimize {job} --json {words}"))).unwrap()
    };
    assert!(of("")["roles"]["kept_on_host"].is_string());
    assert_eq!(of("--forbid offload=activations")["roles"].get("kept_on_host"), None);
    let said = asked(&format!("optimize {JOB} --pin offload=activations --pin schedule=terapipe"));
    assert!(said.err.contains("a schedule that cuts sequences cannot keep it on the hosts"), "{said}");
    let said = asked(&format!("optimize {JOB} --pin offload=activations --target megatron"));
    assert!(
        said.err.contains("megatron is planned with activations and parameters on the devices"),
        "{said}"
    );
}

#[test]
fn a_host_that_is_forbidden_or_too_small_is_said_to_be_what_lacks() {
    let said = refused(&format!("optimize {JOB} --forbid offload"));
    assert!(said.contains("what pays on the hosts, nothing of it forbidden (offload=allowed)"), "{said}");

    let (cluster, node) = (fresh("small-host.json"), "fixtures/clusters/dgx-h100.json");
    let mut file = read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(node));
    file["groups"][0]["host_memory_gib"] = 64.into();
    std::fs::write(&cluster, file.to_string()).unwrap();
    let said = refused(&format!("optimize llama-3-8b {} --devices 1", cluster.display()));
    assert!(
        said.contains(
            "119.7 GiB of 57.6 GiB on stage 0, most of it states and activations in the memory of its node's host"
        ),
        "{said}"
    );
}

/// A node of one H100 whose host has so much memory, and drives of so many TB that read 50 and write 25 GB/s.
fn with_drives(name: &str, host_memory_gib: u64, capacity_tb: f64) -> String {
    let (cluster, node) = (fresh(name), "fixtures/clusters/dgx-h100.json");
    let mut file = read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(node));
    let group = &mut file["groups"][0];
    group["host_memory_gib"] = host_memory_gib.into();
    group["nvme"] = json!({"capacity_tb": capacity_tb, "read_gb_per_s": 50, "write_gb_per_s": 25});
    std::fs::write(&cluster, file.to_string()).unwrap();
    cluster.display().to_string()
}

/// Where the host is too small its drives make a plan fit: bytes by formula, in the plan's figures and in its run.
#[test]
fn drives_take_what_the_host_cannot() {
    let path = fresh("drives.json");
    let (plan, cluster) = (path.display(), with_drives("drives-cluster.json", 64, 30.0));
    // Without drives this host is refused above.
    let report = done(&format!("optimize llama-3-8b {cluster} --devices 1 -o {plan}"));
    assert!(report.contains("optimizer on nvme"), "{report}");
    assert!(
        report.contains("hosts hold optimizer states, which they update; of these all on NVMe drives"),
        "{report}"
    );
    assert!(report.contains("NVMe drives hold 89.7 GiB"), "{report}");
    let stage = &read(&path)["predicted"]["stages"][0];
    // An fp32 value and two moments of every parameter.
    let n = 8_030_261_248.0;
    assert_eq!(stage["nvme_bytes"].as_f64(), Some(12.0 * n));
    assert!(stage["host_memory_bytes"].as_f64().unwrap() < 0.9 * 64.0 * f64::from(1 << 30));

    assert_counted_and_proven(
        &path,
        &[
            "optimizer states read off the drives",
            "optimizer states written to the drives",
            "arenas on the hosts",
            "arenas on the drives",
        ],
    );
    assert!(done(&format!("explain {plan}")).contains("read into its host's memory, updated there"));
    let compared = done(&format!("explain {plan} --why-not offload=optimizer"));
    assert!(compared.contains("offload=optimizer does not fit"), "{compared}");
    let described = done(&format!("clusters {cluster}"));
    assert!(described.contains("nvme per node") && described.contains("27.3 TiB"), "{described}");
}

/// On a slow network a step waits for its gradients, and layers are blended from choices that hide them: hosts hold of
/// those what they were told to hold.
#[test]
fn hosts_hold_what_they_are_told_to_of_blended_layers_too() {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/clusters/dgx-h100.json");
    let (path, cluster) = (fresh("blended.json"), fresh("blended-cluster.json"));
    let mut file = read(&shipped);
    file["tiers"][1]["oversubscription"] = 4.into();
    std::fs::write(&cluster, file.to_string()).unwrap();
    for (offload, kept, parameters) in
        [("all", json!("all"), json!("all")), ("states", Value::Null, json!("all"))]
    {
        let pins = format!("offload={offload},zero=0,recompute=full,pp=1,tp=1,micro-batch=1");
        let job = "--nodes 2 --global-batch 128 --seq-len 1024";
        done(&format!("optimize llama-3-8b {} {job} --pin {pins} -o {}", cluster.display(), path.display()));
        let roles = &read(&path)["roles"];
        assert_eq!((&roles["kept_on_host"], &roles["parameters_on_host"]), (&kept, &parameters), "{roles}");
    }
}

/// A tied table is stored in one way in both layers that use it, whichever of them would lack its host more alone.
#[test]
fn a_tied_table_lies_in_one_memory() {
    let node = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/clusters/rtx4090-x8.json");
    let (path, cluster) = (fresh("tied.json"), fresh("tied-cluster.json"));
    for host_memory_gib in [67, 12, 8] {
        let mut file = read(&node);
        let group = &mut file["groups"][0];
        group["host_memory_gib"] = host_memory_gib.into();
        group["nvme"] = json!({"capacity_tb": 4, "read_gb_per_s": 14, "write_gb_per_s": 10});
        std::fs::write(&cluster, file.to_string()).unwrap();
        let asked = format!("optimize gpt2-xl {} --devices 1 --pin offload=allowed", cluster.display());
        done(&format!("{asked} -o {}", path.display()));
        let found = read(&path);
        let home = |layer: &str, tensor: &str| {
            let entries = found["entries"].as_array().unwrap();
            let entry = entries.iter().find(|entry| entry["layer"] == layer).unwrap();
            let parameters = entry["parameters"].as_array().unwrap();
            parameters.iter().find(|one| one["tensor"] == tensor).unwrap()["optimizer_home"].clone()
        };
        assert_eq!(home("embedding", "table"), home("head", "logits.weight"));
        assert_counted_and_proven(&path, &[]);
    }
}

/// Where the host has room nothing goes to its drives, unless it must; what that costs is what is read and written.
#[test]
fn drives_are_slower_than_memory() {
    let cluster = with_drives("drives-roomy.json", 2048, 30.0);
    let of = |offload: &str| -> Value {
        let job = format!("llama-3-8b {cluster} --devices 1");
        serde_json::from_str(&done(&format!("optimize {job} --json --pin offload={offload}"))).unwrap()
    };
    let [free, host, nvme] = ["allowed", "optimizer", "nvme"].map(of);
    assert_eq!(free["roles"].get("optimizer_on_nvme"), None);
    assert_eq!(nvme["roles"]["optimizer_on_nvme"], "all");
    let n = 8_030_261_248.0;
    let stage = &nvme["predicted"]["stages"][0];
    // A gradient of every parameter, and the value and moments of the largest.
    assert_eq!(stage["host_memory_bytes"].as_f64(), Some(4.0 * n + 12.0 * 128_256.0 * 4096.0));
    let offload = |plan: &Value| plan["predicted"]["breakdown"]["offload_s"].as_f64().unwrap();
    let expected = offload(&host) + 12.0 * n / 50e9 + 12.0 * n / 25e9;
    assert!((offload(&nvme) / expected - 1.0).abs() < 1e-9, "{} {expected}", offload(&nvme));
}

#[test]
fn drives_that_are_missing_or_full_are_said_to_be_what_lacks() {
    let full = with_drives("drives-full.json", 64, 0.08);
    let said = refused(&format!("optimize llama-3-8b {full} --devices 1 --pin offload=nvme"));
    assert!(said.contains("optimizer states on its node's NVMe drives"), "{said}");

    let missing = asked(&format!("optimize {JOB} --pin offload=nvme"));
    assert_eq!(missing.code, 2, "{missing}");
    assert!(missing.err.contains("nodes of groups[0] of the cluster have no NVMe drives"), "{missing}");

    let drives = with_drives("drives-forbidden.json", 64, 30.0);
    let said = refused(&format!(
        "optimize llama-3-8b {drives} --devices 1 --pin offload=allowed --forbid offload=nvme"
    ));
    assert!(said.contains("in the memory of its node's host"), "{said}");
    let target =
        asked(&format!("optimize llama-3-8b {drives} --devices 1 --pin offload=nvme --target deepspeed"));
    assert!(target.err.contains("deepspeed is planned with optimizer states in memory"), "{target}");
}

/// A plan whose drives are gone is refused where it is read, one that is named in full where they are full.
#[test]
fn drives_that_are_gone_or_full_refuse_what_is_given() {
    let path = fresh("edited.json");
    let (plan, cluster) = (path.display(), with_drives("drives-edited.json", 64, 30.0));
    done(&format!("optimize llama-3-8b {cluster} --devices 1 -o {plan}"));
    let mut edited = read(&path);
    edited["cluster"]["groups"][0].as_object_mut().unwrap().remove("nvme").unwrap();
    std::fs::write(&path, edited.to_string()).unwrap();
    let gone = asked(&format!("explain {plan}"));
    assert_eq!(gone.code, 2, "{gone}");
    assert!(
        gone.err.contains("optimizer_home: `nvme`, but nodes of `cluster.groups[0]` have no drives"),
        "{gone}"
    );
    let named =
        |cluster: &str| format!("estimate llama-3-8b {cluster} --devices 1 --offload nvme --recompute full");
    assert!(done(&named(&cluster)).contains("optimizer on nvme, recompute full"));
    let said = refused(&named(&with_drives("drives-estimate.json", 64, 0.08)));
    assert!(
        said.contains(
            "89.7 GiB of 74.5 GiB on stage 0, most of it optimizer states on its node's NVMe drives"
        ),
        "{said}"
    );
}

#[test]
fn engines_that_cannot_update_on_hosts_are_not_planned_so() {
    refused(&format!("optimize {JOB} --target torchtitan"));
    let pinned = asked(&format!("optimize {JOB} --target torchtitan --pin offload=optimizer"));
    assert!(pinned.err.contains("torchtitan cannot run offload=optimizer"), "{pinned}");
}

/// Hosts are not asked where a plan fits and bounds promise little of them, but named where states crowd the devices;
/// asked, they make this one faster.
#[test]
fn hosts_that_may_help_are_named_and_asked_on_request() {
    let plain = done("optimize llama-2-7b dgx-a100-80 --devices 2 --json");
    let asked = done("optimize llama-2-7b dgx-a100-80 --devices 2 --pin offload=allowed --json");
    let [plain, asked]: [Value; 2] = [&plain, &asked].map(|text| serde_json::from_str(text).unwrap());
    assert_eq!(plain["roles"].get("offload"), None);
    assert!(plain["warnings"].to_string().contains("--pin offload=allowed"), "{}", plain["warnings"]);
    let time = |plan: &Value| plan["predicted"]["step_time_s"].as_f64().unwrap();
    assert!(asked["roles"]["offload"].is_string());
    assert!(time(&asked) < time(&plain), "{} {}", time(&asked), time(&plain));
    let roomy = done("optimize llama-3-8b dgx-h100 --devices 16");
    assert!(!roomy.contains("offload") && !roomy.contains("on the host"), "{roomy}");
}

/// States that no device has room for are updated on the hosts, which no choice avoids: without that the bound was half
/// of the step.
#[test]
fn bounds_count_memory_where_hosts_may_hold_parameters() {
    let question = "llama-3-8b rtx4090-x8 --devices 4 --global-batch 16 --seq-len 4096 --json";
    let plan = |pins: &str| -> Value {
        serde_json::from_str(&done(&format!("optimize {question} --pin pp=4,{pins}"))).unwrap()
    };
    let allowed = plan("offload=allowed");
    let gap = allowed["search"]["gap"].as_f64().unwrap();
    assert!(gap < 0.4, "{gap}");
    let least = allowed["search"]["lower_bound_s"].as_f64().unwrap();
    let held = plan("offload=all");
    assert!(held["predicted"]["step_time_s"].as_f64().unwrap() > least);
}

/// Nobody needs to ask for hosts where they make a step a tenth shorter; who does not want them says so.
#[test]
fn hosts_come_in_by_themselves_where_a_step_is_a_tenth_shorter() {
    let ask = |more: &[&str]| {
        tests::json(&[&["optimize", "llama-3-8b", "dgx-h100", "--devices", "2"], more].concat())
    };
    let time = |plan: &Value| tests::number(&plan["predicted"]["step_time_s"]);
    let (free, without, allowed) =
        (ask(&[]), ask(&["--pin", "offload=none"]), ask(&["--pin", "offload=allowed"]));
    assert!(time(&free) < 0.9 * time(&without), "{} {}", time(&free), time(&without));
    assert!(time(&free) < 1.01 * time(&allowed), "{} {}", time(&free), time(&allowed));
    let warning = free["warnings"].to_string();
    assert!(warning.contains("hosts hold ") && warning.contains("(--pin offload=none)"), "{warning}");
}

/// Where devices differ too: eight billion parameters crowd an H100 beside an A100, and hosts nearly halve the step.
#[test]
fn hosts_are_asked_on_devices_that_differ() {
    let of = |words: &str| -> Value {
        serde_json::from_str(&done(&format!(
            "optimize llama-3-8b h100-a100-pcie --global-batch 64 --json {words}"
        )))
        .unwrap()
    };
    let time = |plan: &Value| plan["predicted"]["step_time_s"].as_f64().unwrap();
    let (free, without) = (of(""), of("--pin offload=none"));
    assert!(time(&free) < 0.6 * time(&without), "{} {}", time(&free), time(&without));
    assert!(free["warnings"].to_string().contains("hosts hold"), "{}", free["warnings"]);
}

/// Whoever forbids some of what hosts may hold leaves the rest open, and whoever forbids to leave them out has them.
#[test]
fn hosts_hold_what_nobody_forbids() {
    let job = format!("{JOB} --global-batch 8 --json");
    let of = |forbid: &str| -> Value {
        serde_json::from_str(&done(&format!("optimize {job} --forbid {forbid}"))).unwrap()
    };
    let keeps = |plan: &Value| plan["runners_up"].to_string().contains("kept_on_host");
    // Its node has no drives.
    let [plain, without] = ["offload=nvme", "offload=activations"].map(of);
    for plan in [&plain, &without] {
        assert_eq!(plan["roles"]["offload"], "optimizer");
    }
    assert!(keeps(&plain) && !keeps(&without), "{} {}", plain["runners_up"], without["runners_up"]);
    let states = refused(&format!("optimize {job} --forbid offload=optimizer"));
    assert!(states.contains("nothing of it forbidden (offload=allowed)"), "{states}");
    for (pin, forbid) in [("both", "activations"), ("all", "optimizer"), ("nvme", "nvme")] {
        let said = asked(&format!("optimize {job} --pin offload={pin} --forbid offload={forbid}"));
        assert_eq!((said.code, said.err.contains("both chosen and forbidden")), (2, true), "{said}");
    }
    let report = done("optimize gpt2 dgx-h100 --global-batch 64 --forbid offload=none");
    assert!(report.contains("on the host"), "{report}");
}

/// Where nothing crowds memory, hosts that may hold something are no reason for a slower plan: choices beside them are
/// weighed otherwise.
#[test]
fn hosts_that_may_be_used_cost_no_plan_without_them() {
    let questions = [
        ("gpt2 rtx4090-x8 --devices 5 --global-batch 3 --seq-len 333", ""),
        ("gpt2-xl dgx-a100-40 --devices 16 --global-batch 31 --seq-len 1001", ""),
        ("gpt2 dgx-a100-40 --devices 4 --global-batch 8", "layers-per-stage=3,3,3,3,"),
    ];
    for (question, pins) in questions {
        let time = |offload: &str| {
            let plan: Value = serde_json::from_str(&done(&format!(
                "optimize {question} --pin {pins}offload={offload} --json"
            )))
            .unwrap();
            plan["predicted"]["step_time_s"].as_f64().unwrap()
        };
        let (allowed, without) = (time("allowed"), time("none"));
        assert!(allowed <= without * 1.0025, "{question}: {allowed} s, without hosts {without}");
    }
}

/// Activations alone are much cheaper to hold here than any optimizer states.
#[test]
fn hosts_that_must_be_used_hold_what_costs_least() {
    let question = "gpt2 dgx-a100-40 --devices 2 --global-batch 3 --seq-len 384 --json";
    let time = |words: &str| {
        let plan: Value = serde_json::from_str(&done(&format!("optimize {question} {words}"))).unwrap();
        plan["predicted"]["step_time_s"].as_f64().unwrap()
    };
    let (free, named) = (time("--forbid offload=none"), time("--pin offload=activations"));
    assert!(free <= named * 1.0025, "{free} s, activations alone {named}");
}
