//! Random range sets against two slow oracles: one marks bytes, one counts in wider numbers.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use super::*;

/// One range as a client means it, in numbers that no `u64` need hold.
#[derive(Debug, Clone, Copy)]
enum Asked {
    FromTo(u128, u128),
    From(u128),
    Suffix(u128),
}

impl Asked {
    fn covers(self, offset: u128, length: u128) -> bool {
        offset < length
            && match self {
                Self::FromTo(first, last) => first <= offset && offset <= last,
                Self::From(first) => first <= offset,
                Self::Suffix(suffix) => length - offset <= suffix,
            }
    }

    fn spell(self, (before, zeros, after): Decoration) -> String {
        let number = |number: u128| format!("{zeros}{number}");
        let spec = match self {
            Self::FromTo(first, last) => format!("{}-{}", number(first), number(last)),
            Self::From(first) => format!("{}-", number(first)),
            Self::Suffix(suffix) => format!("-{}", number(suffix)),
        };
        format!("{before}{spec}{after}")
    }
}

/// What may stand before a range, before its numbers and after it without changing its meaning.
type Decoration = (&'static str, &'static str, &'static str);

fn decoration() -> impl Strategy<Value = Decoration> {
    (
        select(vec!["", "", " ", "\t", ", ,"]),
        select(vec!["", "", "0", "00000000000000000000000"]),
        select(vec!["", "", " ", "\t ", " ,"]),
    )
}

fn sets(
    ask: impl Strategy<Value = Asked> + 'static,
) -> impl Strategy<Value = Vec<(Asked, Decoration)>> {
    let asked = (ask, decoration()).boxed();
    prop_oneof![8 => vec(asked.clone(), 1..=5), 2 => vec(asked, 6..=18)]
}

fn some_bytes((first, more): (u128, u128)) -> Asked {
    Asked::FromTo(first, first + more)
}

fn perhaps_reversed((first, last): (u128, u128)) -> Asked {
    Asked::FromTo(first, last)
}

fn plan_for(set: &[(Asked, Decoration)], length: u64) -> Plan {
    let specs: Vec<String> = set
        .iter()
        .map(|(ask, decoration)| ask.spell(*decoration))
        .collect();
    let headers = header_map(&[("range", format!("bytes={}", specs.join(",")))]);
    plan(false, &headers, &representation(length))
}

/// Sets over a short file, most of them with ranges short enough to leave gaps.
fn short_sets() -> impl Strategy<Value = (u64, Vec<(Asked, Decoration)>)> {
    (1_u64..=120).prop_flat_map(|length| {
        let offset = 0..=u128::from(length) + 2;
        let ask = prop_oneof![
            20 => (offset.clone(), 0_u128..4).prop_map(some_bytes),
            4 => (offset.clone(), 0_u128..40).prop_map(some_bytes),
            1 => (offset.clone(), offset.clone()).prop_map(perhaps_reversed),
            1 => offset.clone().prop_map(Asked::From),
            1 => offset.prop_map(Asked::Suffix),
        ];
        (Just(length), sets(ask))
    })
}

/// Marks every byte of the file with those who asked for it and reads the answer off the marks.
fn answer_by_marks(asked: &[Asked], length: u64) -> Plan {
    let is_reversed = |ask: &Asked| matches!(ask, Asked::FromTo(first, last) if last < first);
    if asked.len() > 16 || asked.iter().any(is_reversed) {
        return Plan::Whole;
    }
    // For each byte, the places in the request of those who want it.
    let marks: Vec<Vec<usize>> = (0..u128::from(length))
        .map(|offset| {
            let wants = |place: &usize| asked[*place].covers(offset, length.into());
            (0..asked.len()).filter(wants).collect()
        })
        .collect();
    if marks.iter().any(|wanted_by| wanted_by.len() >= 3) {
        return Plan::Whole;
    }

    let mut runs: Vec<(usize, ByteRange)> = Vec::new();
    for (offset, wanted_by) in (0..length).zip(&marks) {
        let Some(place) = wanted_by.iter().min() else {
            continue;
        };
        match runs.last_mut() {
            Some((first_place, run)) if run.last + 1 == offset => {
                run.last = offset;
                *first_place = (*first_place).min(*place);
            }
            _ => runs.push((*place, bytes(offset, offset))),
        }
    }
    in_order(runs)
}

/// Sets over a file of any length, with numbers near every edge there is.
fn wide_sets() -> impl Strategy<Value = (u64, Vec<(Asked, Decoration)>)> {
    let length = prop_oneof![
        Just(u64::MAX),
        Just(1 << 63),
        any::<u64>().prop_map(|n| n.max(1))
    ];
    length.prop_flat_map(|length| {
        let edges = [
            0,
            u128::from(length),
            1 << 63,
            1 << 64,
            u128::from(u64::MAX) * 10,
            1 << 100,
        ];
        let near = (select(edges.to_vec()), 0_u128..24)
            .prop_map(|(edge, more)| (edge + more).saturating_sub(12));
        let number = prop_oneof![4 => near, 2 => any::<u64>().prop_map(u128::from)].boxed();
        let ask = prop_oneof![
            4 => (number.clone(), number.clone())
                .prop_map(|(one, other)| Asked::FromTo(one.min(other), one.max(other))),
            8 => (number.clone(), 0_u128..12).prop_map(some_bytes),
            1 => (number.clone(), number.clone()).prop_map(perhaps_reversed),
            1 => number.clone().prop_map(Asked::From),
            1 => number.prop_map(Asked::Suffix),
        ];
        (Just(length), sets(ask))
    })
}

/// Cuts, then merges by twos until nothing changes, in numbers so wide that none can overflow.
fn answer_in_wide_numbers(asked: &[Asked], length: u64) -> Plan {
    let length = u128::from(length);
    let is_reversed = |ask: &Asked| match *ask {
        Asked::FromTo(first, last) => last < first,
        Asked::From(_) | Asked::Suffix(_) => false,
    };
    if asked.len() > 16 || asked.iter().any(is_reversed) {
        return Plan::Whole;
    }

    let mut wanted: Vec<(usize, u128, u128)> = Vec::new();
    for (place, ask) in asked.iter().enumerate() {
        let (first, end) = match *ask {
            Asked::FromTo(first, last) => (first, length.min(last + 1)),
            Asked::From(first) => (first, length),
            Asked::Suffix(suffix) => (length - suffix.min(length), length),
        };
        if first < end {
            wanted.push((place, first, end));
        }
    }
    let covering = |offset: u128| asked.iter().filter(move |ask| ask.covers(offset, length));
    let is_crowded = |offset: u128| covering(offset).count() >= 3;
    if wanted
        .iter()
        .any(|(_, first, end)| is_crowded(*first) || is_crowded(end - 1))
    {
        return Plan::Whole;
    }

    while let Some((one, other)) = find_touching(&wanted) {
        let (place, first, end) = wanted.remove(other);
        let kept = &mut wanted[one];
        *kept = (kept.0.min(place), kept.1.min(first), kept.2.max(end));
    }
    let narrow = |offset: u128| u64::try_from(offset).unwrap();
    let narrow_run = |(place, first, end)| (place, bytes(narrow(first), narrow(end - 1)));
    in_order(wanted.into_iter().map(narrow_run).collect())
}

fn find_touching(ranges: &[(usize, u128, u128)]) -> Option<(usize, usize)> {
    let pairs =
        (0..ranges.len()).flat_map(|one| (one + 1..ranges.len()).map(move |other| (one, other)));
    pairs.into_iter().find(|(one, other)| {
        let ((_, first, end), (_, other_first, other_end)) = (ranges[*one], ranges[*other]);
        first <= other_end && other_first <= end
    })
}

fn in_order(mut runs: Vec<(usize, ByteRange)>) -> Plan {
    runs.sort_by_key(|(place, _)| *place);
    let ranges: Vec<ByteRange> = runs.into_iter().map(|(_, range)| range).collect();
    match ranges.len() {
        0 => Plan::NotSatisfiable,
        1 => Plan::One(ranges[0]),
        _ => Plan::Many(ranges),
    }
}

/// Bytes that a header field may hold, most of them such as conditions are made of.
fn field() -> impl Strategy<Value = Vec<u8>> {
    let pieces: Vec<&[u8]> = vec![
        b"bytes=",
        b"0",
        b"7",
        b"99",
        b"-",
        b",",
        b" ",
        b"\t",
        b"\"",
        b"W/",
        b"*",
        b"\xff",
        b"=",
        b"18446744073709551615",
        ETAG.as_bytes(),
        LAST_MODIFIED.as_bytes(),
        b" GMT",
        b":",
        b"Nov",
    ];
    prop_oneof![
        vec(select(pieces), 0..12).prop_map(|pieces| pieces.concat()),
        vec(
            select((0x20..=0x7e).chain(0x80..=0xff).collect::<Vec<u8>>()),
            0..40
        ),
    ]
}

fn fields() -> impl Strategy<Value = Vec<(&'static str, Vec<u8>)>> {
    let names = vec![
        "range",
        "range",
        "range",
        "if-range",
        "if-match",
        "if-none-match",
        "if-modified-since",
        "if-unmodified-since",
    ];
    vec((select(names), field()), 0..4)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn a_plan_holds_the_bytes_that_were_asked_for((length, set) in short_sets()) {
        let asked: Vec<Asked> = set.iter().map(|(ask, _)| *ask).collect();
        prop_assert_eq!(plan_for(&set, length), answer_by_marks(&asked, length));
    }

    #[test]
    fn no_number_is_too_great((length, set) in wide_sets()) {
        let asked: Vec<Asked> = set.iter().map(|(ask, _)| *ask).collect();
        prop_assert_eq!(plan_for(&set, length), answer_in_wide_numbers(&asked, length));
    }

    #[test]
    fn no_field_breaks_what_a_plan_promises(
        fields in fields(),
        length in select(vec![0, 1, 8, 100, u64::MAX]),
        method_is_head: bool,
    ) {
        let ranges = match plan(method_is_head, &header_map(&fields), &representation(length)) {
            Plan::One(range) => vec![range],
            Plan::Many(ranges) => {
                prop_assert!(ranges.len() >= 2);
                ranges
            }
            Plan::NotSatisfiable => {
                prop_assert!(!method_is_head && length > 0);
                Vec::new()
            }
            Plan::NotModified | Plan::PreconditionFailed | Plan::Whole => Vec::new(),
        };
        prop_assert!(ranges.is_empty() || !method_is_head);
        for (index, range) in ranges.iter().enumerate() {
            prop_assert!(range.first <= range.last && range.last < length);
            for other in &ranges[index + 1..] {
                prop_assert!(range.last + 1 < other.first || other.last + 1 < range.first);
            }
        }
    }
}
