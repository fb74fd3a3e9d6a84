//! The environment: the only file of the process that reads it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;

use super::{ConfigError, Given, Layer, Origin, StoreOptions, Written, keys, parse};

const PREFIX: &str = "IBID_";

/// Variables for whatever drives the tests; never settings.
const TEST_PREFIX: &str = "IBID_TEST_";

/// Names behind `IBID_` that are no keys: the file of the settings, what the
/// client commands take, and what the log shows.
const OTHERS: [&str; 4] = ["config", "token", "server", "log"];

/// What the variables of object stores begin with.
const STORE_PREFIXES: [&str; 3] = ["AWS_", "GOOGLE_", "AZURE_"];

/// The `IBID_*` variables of a process, and those of object stores.
///
/// Its `Debug` names the variables alone, since a value may be a secret.
#[derive(Clone, Default)]
pub struct Environment {
    ours: BTreeMap<String, String>,
    store: StoreOptions,
}

impl Environment {
    /// The variables this process was started with.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if one that means something here is not UTF-8.
    pub fn from_process() -> Result<Environment, ConfigError> {
        Environment::from_os(std::env::vars_os())
    }

    /// As [`Environment::from_process`], of any variables.
    pub(super) fn from_os(
        variables: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Environment, ConfigError> {
        let mut environment = Environment::default();
        let mut problems = Vec::new();
        for (name, value) in variables {
            let name = name.to_string_lossy().into_owned();
            if is_of_a_store(&name) {
                // One that is not UTF-8 means nothing to a store.
                environment
                    .store
                    .0
                    .extend(value.into_string().ok().map(|value| (name, value)));
                continue;
            }
            if !name.starts_with(PREFIX) {
                continue;
            }
            match value.into_string() {
                Ok(value) => {
                    environment.ours.insert(name, value);
                }
                Err(_) if key(&name).is_some() || is_no_setting(&name) => problems.push(format!(
                    "the environment variable {name} is not UTF-8: set it to text, or unset it"
                )),
                // Its name is all that the warning needs.
                Err(_) => {
                    environment.ours.insert(name, String::new());
                }
            }
        }
        if problems.is_empty() {
            Ok(environment)
        } else {
            Err(ConfigError::new(problems))
        }
    }

    /// The value of the variable `name`, as `IBID_TOKEN`.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.ours.get(name).map(String::as_str)
    }

    /// The variables by which object stores are reached.
    pub(super) fn store_options(&self) -> StoreOptions {
        self.store.clone()
    }

    /// The file that `IBID_CONFIG` names.
    pub(super) fn config(&self) -> Option<(&str, Origin)> {
        let variable = keys::variable("config");
        let path = self.get(&variable)?;
        Some((path, Origin::Environment { variable }))
    }

    /// What the variables say. One that is no setting is ignored with a warning, not refused:
    /// Kubernetes sets `IBID_PORT`, `IBID_SERVICE_HOST` and others for a service named ibid.
    pub(super) fn layer(&self, warnings: &mut Vec<String>) -> Layer {
        let mut layer = Layer::new();
        for (variable, value) in &self.ours {
            if is_no_setting(variable) {
                continue;
            }
            let Some(key) = key(variable) else {
                warnings.push(ignored(variable));
                continue;
            };
            let value = Written::Text(value.clone());
            let variable = variable.clone();
            let origin = Origin::Environment { variable };
            layer.insert(key.name, Given { value, origin });
        }
        layer
    }
}

/// Takes the pairs whose name starts with `IBID_` or as those of object stores, and leaves the
/// others.
impl<K: Into<String>, V: Into<String>> FromIterator<(K, V)> for Environment {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(pairs: I) -> Environment {
        let mut environment = Environment::default();
        for (name, value) in pairs {
            let (name, value) = (name.into(), value.into());
            if is_of_a_store(&name) {
                environment.store.0.insert(name, value);
            } else if name.starts_with(PREFIX) {
                environment.ours.insert(name, value);
            }
        }
        environment
    }
}

fn is_of_a_store(name: &str) -> bool {
    STORE_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

impl fmt::Debug for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.ours.keys()).finish()
    }
}

/// The key that `variable` is named after.
fn key(variable: &str) -> Option<&'static keys::Key> {
    keys::KEYS
        .iter()
        .find(|key| keys::variable(key.name) == variable)
}

/// The sentence about a variable that means nothing here.
fn ignored(variable: &str) -> String {
    let name = variable.strip_prefix(PREFIX).unwrap_or(variable);
    let advice = match parse::nearest(name, keys::names().chain(OTHERS)) {
        Some(key) => format!(": write {} if that is meant", keys::variable(key)),
        None => String::new(),
    };
    format!("the environment variable {variable} is ignored, since it is no setting{advice}")
}

fn is_no_setting(variable: &str) -> bool {
    variable.starts_with(TEST_PREFIX) || OTHERS.iter().any(|name| keys::variable(name) == variable)
}
