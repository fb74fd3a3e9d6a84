mod properties;
mod rows;
mod table;

use http::header::{HeaderName, HeaderValue};

use super::*;

const ETAG: &str = "\"0b5c\"";

/// `Tue, 14 Nov 2023 22:13:20 GMT`.
const LAST_MODIFIED_S: i64 = 1_700_000_000;
const LAST_MODIFIED: &str = "Tue, 14 Nov 2023 22:13:20 GMT";
const A_SECOND_EARLIER: &str = "Tue, 14 Nov 2023 22:13:19 GMT";
const A_SECOND_LATER: &str = "Tue, 14 Nov 2023 22:13:21 GMT";

/// The plan for a GET of a hundred bytes.
fn get(fields: &[(&str, &str)]) -> Plan {
    plan(false, &header_map(fields), &representation(100))
}

fn head(fields: &[(&str, &str)]) -> Plan {
    plan(true, &header_map(fields), &representation(100))
}

fn representation(length: u64) -> Representation<'static> {
    Representation {
        length,
        etag: ETAG,
        last_modified_s: LAST_MODIFIED_S,
    }
}

fn header_map<Value: AsRef<[u8]>>(fields: &[(&str, Value)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        let name: HeaderName = name.parse().unwrap();
        headers.append(name, HeaderValue::from_bytes(value.as_ref()).unwrap());
    }
    headers
}

fn bytes(first: u64, last: u64) -> ByteRange {
    ByteRange { first, last }
}

#[test]
fn the_three_kinds_of_range_reach_the_first_and_the_last_byte() {
    assert_eq!(get(&[("range", "bytes=0-0")]), Plan::One(bytes(0, 0)));
    assert_eq!(get(&[("range", "bytes=99-")]), Plan::One(bytes(99, 99)));
    assert_eq!(get(&[("range", "bytes=-1")]), Plan::One(bytes(99, 99)));
    assert_eq!(get(&[("range", "bytes=0-")]), Plan::One(bytes(0, 99)));
    assert_eq!(get(&[("range", "bytes=-101")]), Plan::One(bytes(0, 99)));
    assert_eq!(get(&[("range", "bytes=98-1000")]), Plan::One(bytes(98, 99)));
}

#[test]
fn a_set_without_a_byte_is_not_satisfiable() {
    for set in [
        "bytes=100-",
        "bytes=100-200",
        "bytes=-0",
        "bytes=-0,100-,-00",
    ] {
        assert_eq!(get(&[("range", set)]), Plan::NotSatisfiable, "{set}");
    }
}

#[test]
fn one_satisfiable_range_makes_the_set_satisfiable() {
    assert_eq!(
        get(&[("range", "bytes=100-,-0,5-6")]),
        Plan::One(bytes(5, 6))
    );
}

#[test]
fn numbers_beyond_sixty_four_bits_count_as_the_greatest() {
    let huge = "9".repeat(200);
    assert_eq!(
        get(&[("range", &format!("bytes=7-{huge}"))]),
        Plan::One(bytes(7, 99))
    );
    assert_eq!(
        get(&[("range", &format!("bytes=-{huge}"))]),
        Plan::One(bytes(0, 99))
    );
    assert_eq!(
        get(&[("range", &format!("bytes={huge}-"))]),
        Plan::NotSatisfiable
    );
    assert_eq!(get(&[("range", &format!("bytes={huge}-7"))]), Plan::Whole);
    // Even of two such numbers the greater one does not come first.
    let less = "9".repeat(199) + "8";
    for (set, plan) in [
        (format!("bytes={huge}-{less}"), Plan::Whole),
        (format!("bytes=00{less}-{huge}"), Plan::NotSatisfiable),
        (format!("bytes=00{huge}-{huge}"), Plan::NotSatisfiable),
    ] {
        assert_eq!(get(&[("range", &set)]), plan, "{set}");
    }
}

#[test]
fn a_malformed_or_foreign_range_is_ignored() {
    for field in [
        "",
        "bytes",
        "bytes=",
        "bytes=,",
        "bytes=-",
        "bytes=5",
        "bytes=6-5",
        "bytes=0-1,6-5",
        "bytes=0-1,x",
        "bytes=+0-1",
        "bytes=0-+1",
        "bytes=--1",
        "bytes=0-1-2",
        "bytes=0x0-1",
        "bytes=0 - 1",
        "bytes=0- 1",
        "bytes=0-1 2-3",
        "bytes=0-1;2-3",
        "bytes =0-1",
        "bytes:0-1",
        "items=0-1",
        "=0-1",
        "0-1",
        "bytes=0-1,bytes=3-4",
        "bytes==0-1",
        "bytes=1_0-20",
    ] {
        assert_eq!(get(&[("range", field)]), Plan::Whole, "{field}");
    }
    let headers = header_map(&[("range", b"bytes=0-1\xff")]);
    assert_eq!(plan(false, &headers, &representation(100)), Plan::Whole);
}

#[test]
fn the_unit_may_be_in_any_case_and_the_list_loosely_written() {
    assert_eq!(get(&[("range", "BytES=0-1")]), Plan::One(bytes(0, 1)));
    assert_eq!(
        get(&[("range", "bytes=\t, 0-1 ,,\t5-6\t, ")]),
        Plan::Many(vec![bytes(0, 1), bytes(5, 6)])
    );
}

#[test]
fn a_range_that_stands_twice_is_ignored() {
    assert_eq!(
        get(&[("range", "bytes=0-1"), ("range", "bytes=0-1")]),
        Plan::Whole
    );
}

#[test]
fn ranges_that_overlap_or_touch_are_joined_where_the_first_piece_stood() {
    assert_eq!(
        get(&[("range", "bytes=50-59,20-29,0-9,30-39,55-64,11-12")]),
        Plan::Many(vec![
            bytes(50, 64),
            bytes(20, 39),
            bytes(0, 9),
            bytes(11, 12)
        ])
    );
    // The third range bridges the first two.
    assert_eq!(
        get(&[("range", "bytes=20-29,0-9,10-19,90-")]),
        Plan::Many(vec![bytes(0, 29), bytes(90, 99)])
    );
    assert_eq!(
        get(&[("range", "bytes=10-19,0-9")]),
        Plan::One(bytes(0, 19))
    );
}

#[test]
fn two_may_share_a_byte_and_three_may_not() {
    assert_eq!(
        get(&[("range", "bytes=0-9,5-14,10-19")]),
        Plan::One(bytes(0, 19))
    );
    assert_eq!(get(&[("range", "bytes=0-9,5-14,9-19")]), Plan::Whole);
    assert_eq!(get(&[("range", "bytes=99-,-1,90-")]), Plan::Whole);
    // Outside the representation there is nothing to share.
    assert_eq!(
        get(&[("range", "bytes=100-,100-,100-,0-0")]),
        Plan::One(bytes(0, 0))
    );
}

#[test]
fn sixteen_ranges_are_served_and_seventeen_are_not() {
    let set = |count: u64| {
        let specs: Vec<String> = (0..count).map(|i| format!("{0}-{0}", 2 * i)).collect();
        format!("bytes={}", specs.join(",,"))
    };
    let sixteen = (0..16).map(|i| bytes(2 * i, 2 * i)).collect();
    assert_eq!(get(&[("range", &set(16))]), Plan::Many(sixteen));
    assert_eq!(get(&[("range", &set(17))]), Plan::Whole);
    // Those that hold no byte count too.
    assert_eq!(get(&[("range", &format!("{},100-", set(16)))]), Plan::Whole);
}

#[test]
fn an_empty_representation_is_sent_whole() {
    for set in [
        "bytes=0-",
        "bytes=0-0",
        "bytes=-1",
        "bytes=-0",
        "bytes=5-",
        "bytes=0-0,-1",
    ] {
        let headers = header_map(&[("range", set)]);
        assert_eq!(
            plan(false, &headers, &representation(0)),
            Plan::Whole,
            "{set}"
        );
    }
}

#[test]
fn head_knows_conditions_but_no_range() {
    assert_eq!(head(&[("range", "bytes=0-1")]), Plan::Whole);
    assert_eq!(head(&[("range", "bytes=100-")]), Plan::Whole);
    assert_eq!(
        head(&[("range", "bytes=0-1"), ("if-range", ETAG)]),
        Plan::Whole
    );
    assert_eq!(head(&[("if-none-match", ETAG)]), Plan::NotModified);
    assert_eq!(head(&[("if-match", "\"other\"")]), Plan::PreconditionFailed);
}

#[test]
fn if_match_compares_strongly_and_if_none_match_weakly() {
    let weak = format!("W/{ETAG}");
    assert_eq!(get(&[("if-match", ETAG)]), Plan::Whole);
    assert_eq!(get(&[("if-match", &weak)]), Plan::PreconditionFailed);
    assert_eq!(get(&[("if-none-match", ETAG)]), Plan::NotModified);
    assert_eq!(get(&[("if-none-match", &weak)]), Plan::NotModified);
}

#[test]
fn a_star_names_whatever_there_is_but_only_alone() {
    assert_eq!(get(&[("if-match", " * ")]), Plan::Whole);
    assert_eq!(get(&[("if-none-match", "*")]), Plan::NotModified);
    assert_eq!(get(&[("if-match", "*, \"x\"")]), Plan::PreconditionFailed);
    assert_eq!(
        get(&[("if-none-match", "*"), ("if-none-match", "*")]),
        Plan::Whole
    );
}

#[test]
fn tags_spread_over_several_lines_are_one_list() {
    assert_eq!(
        get(&[("if-match", "\"x\""), ("if-match", ETAG)]),
        Plan::Whole
    );
    assert_eq!(
        get(&[("if-none-match", "\"x\""), ("if-none-match", ETAG)]),
        Plan::NotModified
    );
}

#[test]
fn a_list_with_a_syntax_error_names_nothing() {
    for list in [
        "0b5c",
        "\"0b5c",
        "\"0b5c\" \"x\"",
        "\"0b5c\", x",
        "w/\"0b5c\"",
        "",
        ",",
    ] {
        assert_eq!(
            get(&[("if-match", list)]),
            Plan::PreconditionFailed,
            "{list}"
        );
        assert_eq!(get(&[("if-none-match", list)]), Plan::Whole, "{list}");
    }
    assert_eq!(
        get(&[("if-match", ETAG), ("if-match", "x")]),
        Plan::PreconditionFailed
    );
}

#[test]
fn dates_are_compared_to_the_second() {
    let unmodified_since = |date| get(&[("if-unmodified-since", date)]);
    assert_eq!(unmodified_since(A_SECOND_EARLIER), Plan::PreconditionFailed);
    assert_eq!(unmodified_since(LAST_MODIFIED), Plan::Whole);
    assert_eq!(unmodified_since(A_SECOND_LATER), Plan::Whole);

    let modified_since = |date| get(&[("if-modified-since", date)]);
    assert_eq!(modified_since(A_SECOND_EARLIER), Plan::Whole);
    assert_eq!(modified_since(LAST_MODIFIED), Plan::NotModified);
    assert_eq!(modified_since(A_SECOND_LATER), Plan::NotModified);
}

#[test]
fn a_date_that_is_malformed_or_stands_twice_is_no_condition() {
    let (unmodified_since, modified_since) = ("if-unmodified-since", "if-modified-since");
    assert_eq!(get(&[(unmodified_since, "1999")]), Plan::Whole);
    assert_eq!(get(&[(modified_since, "2099")]), Plan::Whole);
    let twice = |name, date| get(&[(name, date), (name, date)]);
    assert_eq!(twice(unmodified_since, A_SECOND_EARLIER), Plan::Whole);
    assert_eq!(twice(modified_since, LAST_MODIFIED), Plan::Whole);
}

#[test]
fn a_date_gives_way_to_a_tag_even_to_a_malformed_one() {
    assert_eq!(
        get(&[
            ("if-match", ETAG),
            ("if-unmodified-since", A_SECOND_EARLIER)
        ]),
        Plan::Whole
    );
    assert_eq!(
        get(&[("if-none-match", "x"), ("if-modified-since", LAST_MODIFIED)]),
        Plan::Whole
    );
}

#[test]
fn a_failed_condition_comes_before_not_modified_and_that_before_any_range() {
    let outside = ("range", "bytes=100-");
    assert_eq!(
        get(&[("if-match", "\"x\""), ("if-none-match", ETAG), outside]),
        Plan::PreconditionFailed
    );
    assert_eq!(
        get(&[
            ("if-unmodified-since", A_SECOND_EARLIER),
            ("if-none-match", ETAG),
            outside
        ]),
        Plan::PreconditionFailed
    );
    assert_eq!(
        get(&[("if-match", ETAG), ("if-none-match", ETAG), outside]),
        Plan::NotModified
    );
    assert_eq!(
        get(&[("if-modified-since", LAST_MODIFIED), outside]),
        Plan::NotModified
    );
    assert_eq!(get(&[("if-match", ETAG), outside]), Plan::NotSatisfiable);
}

#[test]
fn if_range_lets_a_strong_match_through_and_nothing_else() {
    let with = |validator: &str| get(&[("range", "bytes=5-"), ("if-range", validator)]);
    for validator in [ETAG, LAST_MODIFIED, "Tuesday, 14-Nov-23 22:13:20 GMT"] {
        assert_eq!(with(validator), Plan::One(bytes(5, 99)), "{validator}");
    }
    for validator in [
        "W/\"0b5c\"",
        "\"x\"",
        "0b5c",
        "\"0b5c",
        "\"0b5c\", \"x\"",
        "*",
        "",
        "yesterday",
        A_SECOND_EARLIER,
        A_SECOND_LATER,
    ] {
        assert_eq!(with(validator), Plan::Whole, "{validator}");
    }
}

#[test]
fn if_range_that_stands_twice_is_not_trusted() {
    let twice = [
        ("range", "bytes=5-"),
        ("if-range", ETAG),
        ("if-range", ETAG),
    ];
    assert_eq!(get(&twice), Plan::Whole);
}

#[test]
fn an_unmatched_if_range_hides_that_nothing_could_be_satisfied() {
    assert_eq!(
        get(&[("range", "bytes=100-"), ("if-range", "\"x\"")]),
        Plan::Whole
    );
    assert_eq!(
        get(&[("range", "bytes=100-"), ("if-range", ETAG)]),
        Plan::NotSatisfiable
    );
}

#[test]
fn if_range_without_range_is_nothing() {
    assert_eq!(get(&[("if-range", ETAG)]), Plan::Whole);
}

#[test]
fn a_range_knows_its_length() {
    assert_eq!(bytes(7, 7).length(), 1);
    assert_eq!(bytes(0, u64::MAX - 1).length(), u64::MAX);
}
