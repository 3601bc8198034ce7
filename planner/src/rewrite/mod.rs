//! Equal algebraic forms of a layer.
