//! The cases of `ranges.tsv` against the planner.

use std::io::Write;

use super::rows::{Row, table_path};
use super::*;

/// Writes past the test harness, which shows what a passing test prints to no one.
fn say(line: &str) {
    writeln!(std::io::stderr(), "{line}").unwrap();
}

#[test]
fn every_row_of_the_table_gets_its_answer() {
    let path = table_path();
    let Ok(table) = std::fs::read_to_string(&path) else {
        say(&format!(
            "ranges.tsv: SKIPPED, there is no {}",
            path.display()
        ));
        return;
    };

    let (mut rows, mut skipped, mut failures) = (0, 0, Vec::new());
    for row in table.lines().skip(1).map(Row::parse) {
        rows += 1;
        if let Some(reason) = row.other_layer() {
            println!("skipped {}: {reason}", row.case_id);
            skipped += 1;
            continue;
        }
        let representation = row.representation();
        let headers = row.headers(&representation);
        let planned = plan(row.method == "HEAD", &headers, &representation).into();
        let expected = row.expected();
        if expected != planned {
            failures.push(format!(
                "{row:?}\n  expected {expected:?}\n  planned  {planned:?}"
            ));
        }
    }
    let checked = rows - skipped;
    say(&format!(
        "ranges.tsv: {rows} rows, {checked} checked, {skipped} skipped"
    ));
    assert!(
        failures.is_empty(),
        "{} rows failed:\n{}",
        failures.len(),
        failures.join("\n")
    );
    assert!(checked > 400, "only {checked} rows could be judged");
}
