//! Operators: one line each. A line says which dims of which operand or result each loop (factor) walks, which loops
//! cannot be split, which may leave an unfinished sum, what backward needs, and what the operator is linear in.
//!
//! Dims are matched by name: a factor is a dim name, and an operand has the factor where it has a dim of that name.
//! Two operators rename: attention walks the keys' sequence by a loop of its own (`t`), and dispatch and combine walk a
//! sequence and its expert slots by one loop. Everything the search may do with an operator is derived from its line.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Elementwise function between two linear layers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// Exact GELU, by the error function.
    Gelu,
    /// GELU by the tanh approximation.
    GeluTanh,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)^2`.
    ReluSquared,
    /// `sigmoid(x)`.
    Sigmoid,
}

/// How a gated linear unit combines its halves.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", tag = "form")]
pub enum Gating {
    /// `act(gate) * up`.
    Product {
        /// The function applied to the gate.
        act: Activation,
    },
    /// gpt-oss: `g * sigmoid(1.702 g) * (u + 1)` with `g = min(gate, limit)` and `u` clamped to `±limit`.
    ClampedProduct {
        /// The clamp.
        limit: f64,
    },
}

/// How router scores become the weights of the chosen experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RouterScore {
    /// Softmax over all experts, then the best k.
    Softmax,
    /// The best k, then softmax over them.
    SoftmaxOfChosen,
    /// Sigmoid of each score.
    Sigmoid,
}

/// What an operator computes. Operand and result order is in the comment of each variant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", tag = "op")]
pub enum OpKind {
    /// `ids[b s] table[v h] -> y[b s h]`: row lookup; rows outside the local block give zero.
    Embed,
    /// `x[b s h] position[s] table[p h] -> y[b s h]`: adds row `position + offset`.
    AddPosition {
        /// Rows skipped at the start of the table (2 in OPT).
        offset: u64,
    },
    /// `x w -> y`: sums over every dim that `y` lacks; dims in all three are a batch of products.
    Linear,
    /// `x c -> y`: adds a vector along the dims that `c` has.
    Bias,
    /// `x g -> y`: `x / rms(x) * (g + shift)` over the last dim.
    RmsNorm {
        /// Added to the mean square.
        eps: f64,
        /// Added to the weight (1 in Gemma).
        shift: f64,
    },
    /// `x g c -> y`: layer norm over the last dim with weight and bias.
    LayerNorm {
        /// Added to the variance.
        eps: f64,
    },
    /// `x position[s] -> y`: rotates the last `dims` elements of the last dim (all where `dims` is its length).
    Rope {
        /// Base of the frequencies.
        theta: f64,
        /// How many elements are rotated.
        dims: u64,
        /// Whether the rotated elements are the first or the last of the dim.
        side: RotarySide,
    },
    /// `q[b s k r d] k[b t k d] v[b t k n] qpos[s] kpos[t] (slopes[k r])? (sinks[k r])? -> y[b s k r n]`; where every
    /// query sees every key, without positions: `q k v (sinks[k r])? -> y`, and `t` may be of any length.
    Attention {
        /// Scores are multiplied by this; `None` is `1/sqrt(d)`.
        scale: Option<f64>,
        /// Query `i` sees keys in `(i - window, i]`.
        window: Option<u64>,
        /// `cap * tanh(score / cap)`.
        softcap: Option<f64>,
        /// The last operand: per-head slopes of a linear position bias (ALiBi), or sinks.
        bias: AttentionBias,
        /// Which keys a query sees.
        #[serde(default, skip_serializing_if = "AttentionMask::is_causal")]
        mask: AttentionMask,
    },
    /// `gate up -> y`.
    Glu {
        /// How they combine.
        gating: Gating,
    },
    /// `x -> y` elementwise.
    Act {
        /// The function.
        act: Activation,
    },
    /// `x z -> y`: `x * sigmoid(z)`; `z` lacks the last dim.
    Gate,
    /// `a c -> y`.
    Add,
    /// `x -> y`: times a constant.
    Scale {
        /// The constant.
        by: f64,
    },
    /// `x -> y`: `cap * tanh(x / cap)`.
    Softcap {
        /// The cap.
        cap: f64,
    },
    /// `x -> y1 .. yn`: one reader each; backward adds the gradients.
    Fork,
    /// `x[.. g ..] -> parts`: cuts the dim that no part has; a part has a dim of its own length there, or, if that is
    /// one, may have none.
    Split {
        /// Elements of each part.
        sizes: Vec<u64>,
    },
    /// `parts -> x[.. g ..]`: puts parts side by side along a dim that none of them has, as `Split` takes them apart.
    Concat {
        /// Elements of each part.
        sizes: Vec<u64>,
    },
    /// `x[b s ..] -> y[b t ..]`: the rows that slices before have kept, then those of this slice (`slices`). Backward
    /// passes on the own rows of a gradient to which later slices have added. No model has it: it is put there.
    #[serde(skip)]
    Extend,
    /// `x[b s k m] shared[b s p] -> y[b s k d]`: appends `shared` to every head (`d = m + p`).
    AppendShared,
    /// `logits[b s e] (bias[e])? -> weight[b s e]`: weight of the chosen experts, zero elsewhere.
    Route {
        /// Experts per token.
        top_k: u64,
        /// From score to weight.
        score: RouterScore,
        /// Whether the chosen weights are divided by their sum.
        normalize: Normalize,
        /// Factor on the weights.
        scale: f64,
        /// Experts come in this many groups…
        groups: u64,
        /// … of which only the best so many may be chosen from.
        top_groups: u64,
        /// How a group is ranked.
        group_score: GroupScore,
    },
    /// `x[b s h] weight[b s e] (position[s])? -> y[b e c h]`: every routed token in the slot of its position; other
    /// slots are zero. With positions an expert takes tokens in their order until its slots are full, and drops the
    /// rest.
    Dispatch,
    /// `z[b e c h] weight[b s e] (position[s])? -> y[b s h]`: weighted sum over the experts that have a token.
    Combine,
    /// `z[b s .. v] -> m[b s ..]`: maximum; no gradient. Between tokens and words there may be several predictions.
    RowMax,
    /// `z[b s .. v] m[b s ..] -> e[b s ..]`: sum of `exp(z - m)`; no gradient to `m`.
    SumExp,
    /// `z[b s .. v] labels[b s ..] -> t[b s ..]`: the score at the label.
    Pick,
    /// `e m t -> l[b s ..]`: `log e + m - t`; no gradient to `m`, whose two uses cancel.
    CrossEntropy,
    /// `l[.. a] -> y[.. a]`: the losses of several predictions, each times its constant.
    Weigh {
        /// The constants.
        by: Vec<f64>,
    },
    /// `l[b s ..] (labels[b s ..])? -> loss[]`: sum over the tokens, with labels over those whose label is not
    /// negative.
    SumLoss,
}

/// Which end of the head dim is rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RotarySide {
    /// The first elements.
    First,
    /// The last elements.
    Last,
}

/// Extra operand of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AttentionBias {
    /// None.
    None,
    /// The last operand holds per-head slopes times key position (ALiBi).
    Slopes,
    /// The last operand holds per-head logits that join the softmax and are dropped (attention sinks).
    Sinks,
}

/// Which keys a query sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AttentionMask {
    /// Those of its own and of earlier positions, of one sequence.
    #[default]
    Causal,
    /// All: of its own sequence, as in an encoder, or of another value, as in cross-attention (Vaswani et al. 2017,
    /// arXiv 1706.03762, section 3.2.3).
    Full,
}

impl AttentionMask {
    /// True where later positions are hidden.
    pub fn is_causal(&self) -> bool {
        *self == Self::Causal
    }

    /// Operands before slopes or sinks: queries, keys, values and, where these matter, the positions of both.
    pub fn n_operands(self) -> usize {
        match self {
            Self::Causal => 5,
            Self::Full => 3,
        }
    }
}

/// Whether the weights of the chosen experts are divided by their sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Normalize {
    /// They are.
    Sum,
    /// They are not.
    No,
}

/// How a group of experts is ranked before the experts are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum GroupScore {
    /// Its best expert.
    Max,
    /// The sum of its best two.
    TopTwo,
}

/// What the search and the lowering need to know of a kind beyond its dims.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Line {
    /// Name in text forms.
    pub name: &'static str,
    /// Factors that must stay whole on one device, by the dims' position from the end of the first operand.
    pub whole: Whole,
    /// Whether a factor that the result lacks leaves an unfinished sum, a maximum, or must stay whole.
    pub missing: Missing,
    /// Operands that backward needs.
    pub saves: &'static [usize],
    /// Operands that get a gradient where they are not data.
    pub gradients: Gradients,
    /// Whether an unfinished sum may pass through: every operand `Partial`, every result `Partial`.
    pub linear: Linear,
    /// How far two orders of summation may differ.
    pub tolerance: Tolerance,
}

/// Which loops cannot be split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whole {
    /// All can.
    None,
    /// The last dim of the first operand.
    Last,
    /// The named dims of the operands' tails: the last dim of every operand and result.
    Tails,
    /// The table's first dim (positions).
    TableRows,
    /// Attention: the keys' sequence and the head dims.
    KeysAndHeadDims,
}

/// What happens to a loop that a result lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// The result is an unfinished sum over it.
    Sum,
    /// The result is an unfinished maximum over it.
    Max,
    /// It cannot be split.
    Whole,
}

/// Which operands get a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gradients {
    /// All that are not data.
    All,
    /// Only the first `n`.
    First(usize),
    /// None.
    None,
    /// Only operands 0 and 2.
    FirstAndThird,
}

/// Whether an unfinished sum may pass through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Linear {
    /// It may.
    Yes,
    /// It may not.
    No,
}

/// How far results may differ when sums are taken in another order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tolerance {
    /// Not at all: values are moved or combined one by one.
    Exact,
    /// By rounding of a sum.
    Sum,
}

impl OpKind {
    /// Causal attention without window, cap or bias, its scores over the root of the head dim.
    pub const CAUSAL_ATTENTION: Self = Self::Attention {
        scale: None,
        window: None,
        softcap: None,
        bias: AttentionBias::None,
        mask: AttentionMask::Causal,
    };

    /// The operator's line.
    #[rustfmt::skip]
    pub fn line(&self) -> Line {
        use Tolerance::{Exact, Sum};
        let line = |name, whole, missing, saves, gradients, linear, tolerance| Line {
            name, whole, missing, saves, gradients, linear, tolerance,
        };
        use Gradients as G;
        use Linear as L;
        use Missing as M;
        use Whole as W;
        match self {
            //                              name             whole               missing   saves       gradients         linear  tolerance
            Self::Embed              => line("embed",         W::None,            M::Sum,   &[0],       G::All,           L::No,  Exact),
            Self::AddPosition { .. } => line("add-position",  W::TableRows,       M::Whole, &[1],       G::All,           L::No,  Exact),
            Self::Linear             => line("linear",        W::None,            M::Sum,   &[0, 1],    G::All,           L::No,  Sum),
            Self::Bias               => line("bias",          W::None,            M::Whole, &[],        G::All,           L::No,  Exact),
            Self::RmsNorm { .. }     => line("rms-norm",      W::Last,            M::Whole, &[0, 1],    G::All,           L::No,  Sum),
            Self::LayerNorm { .. }   => line("layer-norm",    W::Last,            M::Whole, &[0, 1],    G::All,           L::No,  Sum),
            Self::Rope { .. }        => line("rope",          W::Last,            M::Whole, &[1],       G::First(1),      L::No,  Exact),
            Self::Attention { .. }   => line("attention",     W::KeysAndHeadDims, M::Whole, &[0, 1, 2, 3, 4, 5], G::All,  L::No,  Sum),
            Self::Glu { .. }         => line("glu",           W::None,            M::Whole, &[0, 1],    G::All,           L::No,  Exact),
            Self::Act { .. }         => line("act",           W::None,            M::Whole, &[0],       G::All,           L::No,  Exact),
            Self::Gate               => line("gate",          W::None,            M::Whole, &[0, 1],    G::All,           L::No,  Exact),
            Self::Add                => line("add",           W::None,            M::Whole, &[],        G::All,           L::Yes, Exact),
            Self::Scale { .. }       => line("scale",         W::None,            M::Whole, &[],        G::All,           L::Yes, Exact),
            Self::Softcap { .. }     => line("softcap",       W::None,            M::Whole, &[0],       G::All,           L::No,  Exact),
            Self::Fork               => line("fork",          W::None,            M::Whole, &[],        G::All,           L::Yes, Exact),
            Self::Split { .. }       => line("split",         W::None,            M::Whole, &[],        G::All,           L::Yes, Exact),
            Self::Concat { .. }      => line("concat",        W::None,            M::Whole, &[],        G::All,           L::Yes, Exact),
            Self::Extend             => line("extend",        W::None,            M::Whole, &[],        G::All,           L::No,  Sum),
            Self::AppendShared       => line("append-shared", W::Tails,           M::Whole, &[],        G::All,           L::No,  Exact),
            Self::Route { .. }       => line("route",         W::Last,            M::Whole, &[0, 1],    G::First(1),      L::No,  Sum),
            Self::Dispatch           => line("dispatch",      W::None,            M::Whole, &[1, 2],    G::First(1),      L::No,  Exact),
            Self::Combine            => line("combine",       W::None,            M::Sum,   &[0, 1, 2], G::All,           L::No,  Sum),
            Self::RowMax             => line("row-max",       W::None,            M::Max,   &[],        G::None,          L::No,  Exact),
            Self::SumExp             => line("sum-exp",       W::None,            M::Sum,   &[0, 1],    G::First(1),      L::No,  Sum),
            Self::Pick               => line("pick",          W::None,            M::Sum,   &[1],       G::First(1),      L::No,  Exact),
            Self::CrossEntropy       => line("cross-entropy", W::None,            M::Whole, &[0],       G::FirstAndThird, L::No,  Exact),
            Self::Weigh { .. }       => line("weigh",         W::Last,            M::Whole, &[],        G::All,           L::Yes, Exact),
            Self::SumLoss            => line("sum-loss",      W::None,            M::Sum,   &[1],       G::All,           L::No,  Sum),
        }
    }

    /// Whether it is linear in each of two operands, and heavy: backward is then two products.
    pub fn is_product(&self) -> bool {
        matches!(self, Self::Linear)
    }

    /// Whether its backward reads what its forward keeps beside its results: attention, the log-sum of every query.
    pub fn keeps_statistics(&self) -> bool {
        matches!(self, Self::Attention { .. })
    }

    /// Operands that the gradient of operand `index` needs: of a product the other one, else all that the line saves.
    pub fn gradient_needs(&self, index: usize) -> Vec<usize> {
        let saves = self.line().saves.iter().copied();
        saves.filter(|&operand| !self.is_product() || operand != index).collect()
    }

    /// Whether operand `index` gets a gradient, if it is not data.
    pub fn differentiates(&self, index: usize) -> bool {
        match self.line().gradients {
            Gradients::All => true,
            Gradients::First(n) => index < n,
            Gradients::FirstAndThird => index == 0 || index == 2,
            Gradients::None => false,
        }
    }
}
