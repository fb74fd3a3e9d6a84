//! The flags of the command line, in the sets that commands take.

use std::collections::BTreeMap;
use std::fmt;

use super::{Given, Layer, Origin, Written, keys, unknown};

/// The flags that were given, by key, before anything is judged.
///
/// Its `Debug` names the keys alone, since a value may be a secret.
#[derive(Clone, Default)]
pub struct Flags(BTreeMap<String, String>);

/// Makes a set of flags: for the key `x_y` a flag `--x-y` whose help is the
/// table's, so that a default is written once.
macro_rules! flags {
    ($( $(#[$about:meta])+ $set:ident { $($key:ident)+ } )+) => { $(
        $(#[$about])+
        #[derive(Clone, Default, clap::Args)]
        // Only the command that takes the set has a text about itself.
        #[command(about = None, long_about = None)]
        pub struct $set {
            $(
                #[doc = concat!("The text given for `", stringify!($key), "`.")]
                #[arg(long, help = help(stringify!($key)), long_help = None)]
                pub $key: Option<String>,
            )+
        }

        impl $set {
            /// The flags of this set that were given.
            pub fn flags(&self) -> Flags {
                [$( (stringify!($key), &self.$key) ),+]
                    .into_iter()
                    .filter_map(|(key, value)| Some((key, value.as_ref()?)))
                    .collect()
            }
        }

        impl fmt::Debug for $set {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.flags().fmt(f)
            }
        }
    )+ };
}

flags! {
    /// Where the data is: taken by every command that opens it.
    StoreFlags { config data database source artifacts }

    /// How work is done: taken by `serve` and `worker`.
    WorkFlags {
        workers render_threads lease_seconds poll_seconds max_attempts running_per_user
        retention_days min_free_bytes metrics_listen drain_seconds
    }

    /// How the API answers: taken by `serve`.
    ServeFlags {
        listen public_url part_bytes part_messages link_seconds record_days
        unfinished_per_user exports_per_user_per_day offload signing_keys
        tls_cert tls_key cors_origins
    }
}

impl Flags {
    /// Both sets together. Sets share no key; if they did, `other` would win.
    #[must_use]
    pub fn merge(mut self, other: Flags) -> Flags {
        self.0.extend(other.0);
        self
    }

    /// The file that `--config` names.
    pub(super) fn config(&self) -> Option<(&str, Origin)> {
        Some((self.0.get("config")?, Origin::Flag))
    }

    pub(super) fn layer(&self, problems: &mut Vec<String>) -> Layer {
        let mut layer = Layer::new();
        for (name, value) in self.0.iter().filter(|(name, _)| *name != "config") {
            let Some(key) = keys::find(name) else {
                let place = format!("the flag {}", keys::flag(name));
                problems.push(unknown(&place, name, &["config"], keys::flag));
                continue;
            };
            let value = Written::Text(value.clone());
            let origin = Origin::Flag;
            layer.insert(key.name, Given { value, origin });
        }
        layer
    }
}

impl<K: Into<String>, V: Into<String>> FromIterator<(K, V)> for Flags {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(pairs: I) -> Flags {
        let pairs = pairs.into_iter();
        Flags(
            pairs
                .map(|(key, value)| (key.into(), value.into()))
                .collect(),
        )
    }
}

impl fmt::Debug for Flags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

fn help(name: &str) -> String {
    match keys::find(name) {
        Some(key) => key.help(),
        // The one flag that is no key: it says where the keys are.
        None => "File with settings [default: <data>/ibid.toml, if it is there]".to_owned(),
    }
}
