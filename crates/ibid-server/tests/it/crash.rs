//! Workers that are killed at every point of an attempt, at random instants, and paused past
//! their lease, while exports are created and the log grows: nothing is lost, wrong or left over.
//!
//! `scripts/crash` makes it as long as one likes.

mod home;
mod process;
mod rig;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use self::home::Kept;
use self::rig::Rig;

/// The most kills and pauses before everything is looked at.
const KILLS_OF_A_ROUND: u64 = 60;

/// How many are done where nobody asks for more.
const KILLS: u64 = 60;

/// SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
pub struct Random(u64);

impl Random {
    pub fn of_seed(seed: u64) -> Random {
        Random(seed)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut noise = self.0;
        noise = (noise ^ (noise >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        noise = (noise ^ (noise >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (noise ^ (noise >> 31)) % end
    }
}

/// What was done, and what came of it.
#[derive(Default)]
pub struct Tally {
    pub at_points: BTreeMap<&'static str, u64>,
    pub at_random: u64,
    pub pauses: u64,
    /// Attempts that went on after another worker had done their job.
    pub overtaken: u64,
    /// Those of them whose job was done by an attempt of the same number.
    pub came_back: u64,
    pub jobs: u64,
    /// Uploads of which the ledger had not heard when their worker died: empty ones, which a
    /// bucket's own rule has to end, since nobody can list them.
    pub unheard_of: u64,
    pub wrong: Vec<String>,
    pub stuck: Vec<String>,
    pub left_over: Vec<String>,
}

impl Tally {
    pub fn kills(&self) -> u64 {
        self.at_points.values().sum::<u64>() + self.at_random + self.pauses
    }

    pub fn faults(&self) -> impl Iterator<Item = &String> {
        let faults = self.wrong.iter().chain(&self.stuck);
        faults.chain(&self.left_over)
    }

    fn add(&mut self, other: Tally) {
        for (name, kills) in other.at_points {
            *self.at_points.entry(name).or_default() += kills;
        }
        self.at_random += other.at_random;
        self.pauses += other.pauses;
        self.overtaken += other.overtaken;
        self.came_back += other.came_back;
        self.jobs += other.jobs;
        self.unheard_of += other.unheard_of;
        self.wrong.extend(other.wrong);
        self.stuck.extend(other.stuck);
        self.left_over.extend(other.left_over);
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} kills ({} at {} points, {} at random, {} pauses), {} jobs, {} attempts overtaken, \
             {} wrong, {} stuck, {} left over",
            self.kills(),
            self.at_points.values().sum::<u64>(),
            self.at_points.len(),
            self.at_random,
            self.pauses,
            self.jobs,
            self.overtaken,
            self.wrong.len(),
            self.stuck.len(),
            self.left_over.len(),
        )
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn killed_and_paused_workers_lose_nothing_and_leave_nothing() {
    let kills = asked_for("IBID_TEST_CRASH_KILLS").unwrap_or(KILLS);
    let seed = asked_for("IBID_TEST_CRASH_SEED");
    let seed = seed.unwrap_or_else(|| {
        let id = ibid::ids::ClaimId::random().expect("random numbers");
        id.to_string().bytes().fold(0, |seed: u64, byte| {
            (seed * 31 + u64::from(byte)) % 1_000_000_007
        })
    });
    eprintln!("seed {seed}");
    let share = kills.div_ceil(Kept::ALL.len() as u64);
    let runs = (0..).zip(Kept::ALL).map(|(number, kept)| {
        tokio::spawn(async move {
            let random = Random(seed.wrapping_add(number << 32));
            play(kept, random, share).await
        })
    });
    let runs: Vec<_> = runs.collect();
    let mut all = Tally::default();
    for run in runs {
        all.add(run.await.expect("the run itself does not fail"));
    }
    let missed: BTreeSet<_> = ibid::failpoint::NAMES.into_iter().collect();
    let missed: Vec<_> = missed
        .into_iter()
        .filter(|name| !all.at_points.contains_key(name))
        .collect();
    for (name, kills) in &all.at_points {
        eprintln!("{kills:>6} {name}");
    }
    eprintln!(
        "not hit: {missed:?}; {} attempts had the number of the one that did their job; {} uploads \
         unheard of",
        all.came_back, all.unheard_of
    );
    eprintln!("{all}, seed {seed}");
    let faults: Vec<_> = all.faults().collect();
    assert!(
        faults.is_empty(),
        "{faults:#?}\nrepeat with: scripts/crash {kills} {seed}"
    );
    assert!(kills < 500 || missed.is_empty(), "{missed:?}");
}

/// Rounds on one set-up until so many kills are done, or something is wrong.
async fn play(kept: Kept, random: Random, kills: u64) -> Tally {
    let Some(mut rig) = Rig::open(kept, random).await else {
        return Tally::default();
    };
    while rig.tally.kills() < kills && rig.tally.faults().next().is_none() {
        let goal = kills.min(rig.tally.kills() + KILLS_OF_A_ROUND);
        rig.round(goal).await;
        eprintln!("{}: {}", kept.as_str(), rig.tally);
    }
    rig.end()
}

/// How large somebody wants a test to be.
fn asked_for(variable: &str) -> Option<u64> {
    #[expect(
        clippy::disallowed_methods,
        reason = "how large a test is, is no configuration of the product"
    )]
    let text = std::env::var_os(variable)?;
    Some(text.to_str()?.parse().expect("a number"))
}
