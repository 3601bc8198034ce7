fn main() {
    let mut args = std::env::args().skip(1);
    let (m, c, n) = (args.next().unwrap(), args.next().unwrap(), args.next().unwrap().parse::<u64>().unwrap());
    let model = frontends::read_model("m", frontends::shipped_model(&m).unwrap().text).unwrap();
    let cluster = frontends::read_cluster("c", frontends::shipped_cluster(&c).unwrap().text).unwrap();
    let cluster = frontends::rescale(&cluster, frontends::Size::Nodes(n)).unwrap();
    let mut job = planner::request::Job::defaults(&model, &cluster);
    if let Some(s) = args.next() { job.sequence = s.parse().unwrap(); job.global_batch = planner::request::Job::default_batch(job.sequence); }
    if let Some(s) = args.next() { job.global_batch = s.parse().unwrap(); }
    println!("params {} job {job:?}", model.n_parameters());
    let request = planner::request::Request { model, cluster, job, pins: Default::default() };
    let t = std::time::Instant::now();
    match planner::optimize(&request, &|_| ()) {
        Ok(plan) => {
            println!("{:?}", t.elapsed());
            println!("{:?}", plan.roles); println!("mesh {:?} p {} sched {:?} B {} m {}", plan.mesh.axes.iter().map(|a| a.size).collect::<Vec<_>>(), plan.n_stages, plan.schedule, plan.micro_batch, plan.n_micro_batches);
            println!("{:?}", plan.chunks);
            let p = plan.predicted.as_ref().unwrap();
            println!("step {} mfu {} peak {} GiB", p.step_time_s.0, p.mfu, p.peak_memory_bytes.0/1.0737e9);
            println!("{:#?}", p.breakdown);
            println!("stage0 {:?}", p.stages[0].memory.iter().map(|(k,v)| (k.clone(), (v.0/1e7).round()/100.0)).collect::<Vec<_>>());
            println!("{:?}", plan.search);
            for r in &plan.runners_up { println!("{:?} {} {}", r.roles, r.step_time_s.0, r.reason); }
            for e in &plan.entries { println!("--- {} in {} out {}", e.layer, e.stream, e.out); for o in &e.ops { println!("   {:?}", o); } for o in &e.parameters { println!("   {:?}", o); } }
        }
        Err(e) => println!("{:?} {e:#?}", t.elapsed()),
    }
}
