//! Plain tables: a header, words to the left, figures to the right, no lines, no colour, no look at the terminal.

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

/// How a column stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// Words.
    Left,
    /// Figures.
    Right,
}

/// Text of a table; every row has as many cells as there are columns.
pub(crate) fn table(columns: &[(&str, Side)], rows: &[Vec<String>]) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(columns.iter().map(|(name, _)| *name));
    for row in rows {
        table.add_row(row);
    }
    for (index, (_, side)) in columns.iter().enumerate() {
        let alignment = match side {
            Side::Left => CellAlignment::Left,
            Side::Right => CellAlignment::Right,
        };
        if let Some(column) = table.column_mut(index) {
            // Two spaces between neighbours, none at the edge.
            column.set_cell_alignment(alignment);
            column.set_padding((0, 2));
        }
    }
    let mut text = String::new();
    for line in table.lines() {
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Text of a two-column list of names and values, without a header.
pub(crate) fn list(rows: &[(&str, String)]) -> String {
    let width = rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    rows.iter().map(|(name, value)| format!("{name:width$}  {value}\n")).collect()
}

/// The same table for a page of documentation.
pub(crate) fn markdown(columns: &[(&str, Side)], rows: &[Vec<String>]) -> String {
    let line = |cells: Vec<&str>| format!("| {} |\n", cells.join(" | "));
    let side = |side: &Side| match side {
        Side::Left => "---",
        Side::Right => "---:",
    };
    let mut text = line(columns.iter().map(|(name, _)| *name).collect());
    text.push_str(&line(columns.iter().map(|(_, at)| side(at)).collect()));
    for row in rows {
        text.push_str(&line(row.iter().map(String::as_str).collect()));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_stand_left_and_figures_right() {
        let text = table(
            &[("name", Side::Left), ("time", Side::Right)],
            &[vec!["a".into(), "1.24 s".into()], vec!["long".into(), "9 s".into()]],
        );
        assert_eq!(text, "name    time\na     1.24 s\nlong     9 s\n");
        assert_eq!(list(&[("a", "x".into()), ("bcd", "y".into())]), "a    x\nbcd  y\n");
    }
}
