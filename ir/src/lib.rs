//! The planner's vocabulary: graph, operators, mesh, sharding, programs, cluster, plan.
#![warn(missing_docs)]

pub mod units;
pub mod numbers;
pub mod cluster;
pub mod cluster_limits;
pub mod cluster_part;
pub mod cluster_ranks;
pub mod work;
pub mod op;
pub mod op_limits;
pub mod graph;
pub mod signature;
pub mod mesh;
pub mod sharding;
pub mod collective;
pub mod conversion;
pub mod strategy;
pub mod program;
pub mod region;
pub mod token_order;
pub mod engine;
pub mod positions;
pub mod vocabulary;
pub mod op_work;
pub mod links;
pub mod lower;
pub mod split;
pub mod slices;
pub mod native;
pub mod flat;
pub mod builder;
pub mod schedule;
pub mod names;
pub mod plan;
pub mod shrink;
pub mod text;
