//! False programs.
