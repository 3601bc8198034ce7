//! The clusters that come with the program.

/// A description that comes with the program.
#[derive(Clone, Copy, Debug)]
pub struct Shipped {
    /// Name by which the command line finds it.
    pub name: &'static str,
    /// Its JSON text.
    pub text: &'static str,
}

macro_rules! clusters {
    ($($name:literal)*) => {
        &[$(Shipped { name: $name, text: include_str!(concat!("../../fixtures/clusters/", $name, ".json")) }),*]
    };
}

/// Every shipped cluster, in the order in which they are listed.
pub fn shipped_clusters() -> &'static [Shipped] {
    const ALL: &[Shipped] = clusters!(
        "dgx1-v100" "dgx-a100-40" "dgx-a100-80" "dgx-h100" "dgx-h200" "dgx-h800" "gb200-nvl72" "frontier" "tpu-v4"
        "tpu-v5p" "rtx4090-x8" "mixed-a100-v100" "h100-a100-pcie" "three-regions"
    );
    ALL
}

/// The shipped cluster of a name.
pub fn shipped_cluster(name: &str) -> Option<Shipped> {
    shipped_clusters().iter().find(|cluster| cluster.name == name).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::read_cluster;

    #[test]
    fn every_shipped_cluster_can_be_read_and_bears_its_name() {
        for shipped in shipped_clusters() {
            let cluster = read_cluster(shipped.name, shipped.text).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(cluster.name, shipped.name);
        }
    }

    #[test]
    fn every_figure_of_a_shipped_tier_has_a_source() {
        for shipped in shipped_clusters() {
            let file: crate::cluster_file::ClusterFile = serde_json::from_str(shipped.text).unwrap();
            for tier in &file.tiers {
                for figure in ["bandwidth_gb_per_s", "latency_us"] {
                    assert!(tier.sources.contains_key(figure), "{}: {}: {figure}", shipped.name, tier.name);
                }
            }
            assert!(file.groups.iter().all(|group| group.sources.contains_key("host_memory_gib")));
        }
    }
}
