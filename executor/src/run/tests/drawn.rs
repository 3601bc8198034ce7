//! Plans drawn at random: whatever the rule allows must run and be right.
