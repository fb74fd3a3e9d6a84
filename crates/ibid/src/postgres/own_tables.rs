//! A look at an application's own tables behind the relations of the log: what can be checked of
//! the conditions in docs/own-tables.md.

use serde_json::Value;
use tokio_postgres::Transaction as Begun;
use tokio_postgres::types::Type;
use tokio_postgres::{SimpleQueryMessage, Transaction};

use super::{PgError, begin, describe};

/// What was found where the relations of the log are not ibid's own tables.
#[derive(Clone, Debug, Default)]
pub struct OwnTables {
    /// The relations that are views.
    pub views: Vec<&'static str>,
    /// The tables that they read.
    pub tables: Vec<String>,
    /// What must be otherwise; each says what to do.
    pub failures: Vec<String>,
    /// What the application must answer for.
    pub warnings: Vec<String>,
    /// Every relation can be read.
    pub readable: bool,
}

/// A relation that ibid reads: its columns, and those that a view need not have.
struct Relation {
    name: &'static str,
    columns: &'static [(&'static str, &'static str)],
    optional: &'static [(&'static str, &'static str)],
}

const RELATIONS: [Relation; 5] = [
    Relation {
        name: "message",
        columns: &[
            ("conv", "text"),
            ("seq", "bigint"),
            ("gseq", "bigint"),
            ("xid", "xid8"),
            ("ts", "bigint"),
            ("user_id", "text"),
            ("body", "text"),
            ("body_raw", "bytea"),
        ],
        optional: &[("files", "text")],
    },
    Relation {
        name: "revision",
        columns: &[
            ("conv", "text"),
            ("seq", "bigint"),
            ("gseq", "bigint"),
            ("xid", "xid8"),
            ("ts", "bigint"),
            ("kind", "text"),
            ("body", "text"),
            ("body_raw", "bytea"),
        ],
        optional: &[],
    },
    Relation {
        name: "stay",
        columns: &[
            ("conv", "text"),
            ("user_id", "text"),
            ("from_gseq", "bigint"),
            ("to_gseq", "bigint"),
        ],
        optional: &[("first_seq", "bigint"), ("last_seq", "bigint")],
    },
    Relation {
        name: "conv",
        columns: &[
            ("conv", "text"),
            ("history", "text"),
            ("ex_members", "text"),
        ],
        optional: &[("last_seq", "bigint")],
    },
    Relation {
        name: "account",
        columns: &[("user_id", "text"), ("enabled", "boolean")],
        optional: &[],
    },
];

/// The defaults that make an entry of the log what it is, as PostgreSQL spells them.
const XID_DEFAULT: &str = "pg_current_xact_id()";
const GSEQ_DEFAULT: &str = "nextval('ibid.log_gseq'::regclass)";

/// Looks at the relations of the log; `None` where all of them are ibid's own tables.
pub(super) async fn inspect(client: &mut super::Lent) -> Result<Option<OwnTables>, PgError> {
    let tx = begin(client).await?;
    tx.batch_execute("SET TRANSACTION READ ONLY").await?;
    let kinds = kinds(&tx).await?;
    if kinds.iter().all(|kind| kind == "r") {
        return Ok(None);
    }
    // Names are spelled with their schema, plans have no workers, and an index is used if one can
    // be, however few rows there are: what cannot be is so dear then that it would be compiled.
    tx.batch_execute(
        "SET LOCAL search_path = pg_catalog; SET LOCAL max_parallel_workers_per_gather = 0;
         SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL jit = off",
    )
    .await?;
    let mut look = Look {
        tx,
        found: OwnTables {
            readable: true,
            ..OwnTables::default()
        },
    };
    for (relation, kind) in RELATIONS.iter().zip(&kinds) {
        look.relation(relation, kind).await?;
    }
    let mut found = look.found;
    let log = &kinds[..4];
    if log.iter().any(|kind| kind == "v") && log.iter().any(|kind| kind == "r") {
        found.failures.push(
            "some of ibid.message, ibid.revision, ibid.stay and ibid.conv are views and some are \
             tables of ibid; one log cannot be in both: make views of all four"
                .to_owned(),
        );
    }
    Ok(Some(found))
}

/// The kind of each relation as in `pg_class`; empty if it is missing.
async fn kinds(tx: &Transaction<'_>) -> Result<Vec<String>, PgError> {
    let names = RELATIONS.map(|relation| relation.name);
    let row = tx
        .query_typed_one(
            "SELECT array_agg(coalesce(c.relkind::text, '') ORDER BY n.place)
             FROM unnest($1::text[]) WITH ORDINALITY AS n (name, place)
             LEFT JOIN pg_class c ON c.oid = to_regclass('ibid.' || n.name)",
            &[(&&names[..], Type::TEXT_ARRAY)],
        )
        .await?;
    Ok(row.try_get(0)?)
}

struct Look<'a> {
    tx: Begun<'a>,
    found: OwnTables,
}

impl Look<'_> {
    async fn relation(&mut self, relation: &Relation, kind: &str) -> Result<(), PgError> {
        let name = relation.name;
        match kind {
            "v" => self.found.views.push(name),
            "r" => return Ok(()),
            "" => {
                self.found.readable = false;
                self.fail(format!("ibid.{name} is missing; create the view"));
                return Ok(());
            }
            _ => self.fail(format!(
                "ibid.{name} is neither a table of ibid nor a view; make it a view"
            )),
        }
        if !self.columns(relation).await? {
            self.found.readable = false;
            return Ok(());
        }
        let all = match name {
            "message" | "revision" => "conv, seq, gseq, xid",
            _ => "*",
        };
        let plan = match self
            .explain(&format!("SELECT {all} FROM ibid.{name}"))
            .await?
        {
            Ok(plan) => plan,
            Err(why) => {
                self.found.readable = false;
                self.fail(format!("ibid.{name} cannot be read: {why}"));
                return Ok(());
            }
        };
        for table in nodes(&plan).into_iter().filter_map(table_of) {
            if !self.found.tables.contains(&table) {
                self.found.tables.push(table);
            }
        }
        match name {
            "message" | "revision" => self.entries(name, &plan).await,
            "stay" => self.stays().await,
            _ => Ok(()),
        }
    }

    /// Whether all columns are there and of their types, or of domains over these.
    async fn columns(&mut self, relation: &Relation) -> Result<bool, PgError> {
        let name = relation.name;
        let rows = self
            .tx
            .query_typed(
                "SELECT attname::text,
                        CASE WHEN t.typbasetype = 0 THEN format_type(atttypid, atttypmod)
                             ELSE format_type(t.typbasetype, t.typtypmod) END
                 FROM pg_attribute JOIN pg_type t ON t.oid = atttypid
                 WHERE attrelid = to_regclass('ibid.' || $1) AND attnum > 0 AND NOT attisdropped",
                &[(&name, Type::TEXT)],
            )
            .await?;
        let mut there = Vec::new();
        for row in &rows {
            there.push((row.try_get::<_, &str>(0)?, row.try_get::<_, &str>(1)?));
        }
        let before = self.found.failures.len();
        for (column, wanted) in relation.columns.iter().chain(relation.optional) {
            match there.iter().find(|(known, _)| known == column) {
                Some((_, is)) if is == wanted => {}
                Some((_, is)) => self.fail(format!(
                    "ibid.{name}.{column} is of the type {is} and must be {wanted}; change it in \
                     the view or in the table"
                )),
                None if relation.optional.iter().any(|(known, _)| known == column) => {}
                None => self.fail(format!(
                    "ibid.{name} has no column {column} ({wanted}); add it to the view"
                )),
            }
        }
        Ok(self.found.failures.len() == before)
    }

    /// Entries of the log must be rows of one table as they were written, whatever happens.
    async fn entries(&mut self, name: &str, plan: &Value) -> Result<(), PgError> {
        let nodes = nodes(plan);
        let [scan] = nodes[..] else {
            let nodes: Vec<String> = nodes.into_iter().map(spell).collect();
            self.fail(format!(
                "ibid.{name} is not made of the rows of one table alone (it is read by: {}); \
                 select from one table to which rows are only added, without joins and \
                 subqueries, and keep in its rows what is missing there",
                nodes.join(", ")
            ));
            return Ok(());
        };
        let Some(table) = self.table(scan).await? else {
            let is = spell(scan);
            self.fail(format!(
                "ibid.{name} is not made of the rows of a table (it is read by: {is}); select \
                 from the table to which rows are only added"
            ));
            return Ok(());
        };
        for filter in conditions(scan) {
            self.warn(format!(
                "ibid.{name} leaves out rows by {filter}; for a row that must come out the same \
                 for ever, and the others must have no seq of their own, or exports fail"
            ));
        }
        self.facts(&table);
        let shown: Vec<&str> = scan["Output"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        let [conv, seq, gseq, xid] = shown[..] else {
            self.fail(format!("the plan of ibid.{name} cannot be read"));
            return Ok(());
        };
        self.stored(name, &table, ("gseq", gseq), GSEQ_DEFAULT);
        self.stored(name, &table, ("xid", xid), XID_DEFAULT);
        self.index(name, &table, conv, seq).await
    }

    /// What kind of table it is.
    fn facts(&mut self, table: &Table) {
        let name = &table.name;
        if table.partitioned {
            self.fail(format!(
                "{name} is partitioned or inherits; a filled partition that is attached or \
                 detached changes what was written: use one table"
            ));
        }
        if table.kind != "r" {
            self.fail(format!(
                "{name} is not an ordinary table; use one of this database"
            ));
        }
        if table.row_security {
            self.fail(format!(
                "{name} has row security, which can hide rows from ibid; ALTER TABLE {name} \
                 DISABLE ROW LEVEL SECURITY, or keep the log in a table without it"
            ));
        }
        if table.unlogged {
            self.fail(format!(
                "{name} is not logged, so a crash empties it; ALTER TABLE {name} SET LOGGED"
            ));
        }
        if table.changes > 0 {
            self.warn(format!(
                "{} rows of {name} were updated or deleted, which an entry of the log never may \
                 be; exports that held them fail or have changed: find out who did. If that was \
                 before the views were made, pg_stat_reset_single_table_counters('{name}'::regclass) \
                 begins to count anew",
                table.changes
            ));
        }
    }

    /// `gseq` and `xid` must be columns that are filled by their defaults alone.
    fn stored(&mut self, name: &str, table: &Table, shown: (&str, &str), default: &str) {
        let (what, shown) = shown;
        let Some(column) = table.column(shown) else {
            let why = match shown.contains("xmin") {
                true => ", and xmin means something else after VACUUM or a restore",
                false => "",
            };
            self.fail(format!(
                "ibid.{name}.{what} is {shown} and not a column of {}{why}; store it in the row: \
                 a column that is NOT NULL DEFAULT {default}",
                table.name
            ));
            return;
        };
        let alter = format!("ALTER TABLE {} ALTER COLUMN {}", table.name, column.quoted);
        let (table, column_name) = (&table.name, &column.quoted);
        if !column.not_null {
            self.fail(format!(
                "{table}.{column_name} may be null, and an entry without {what} is in no export; \
                 {alter} SET NOT NULL"
            ));
        }
        if column.default.as_deref() != Some(default) {
            let is = column.default.as_deref().unwrap_or("no default");
            self.fail(format!(
                "{table}.{column_name} must be filled by {default} and has {is}; \
                 {alter} SET DEFAULT {default}"
            ));
        }
    }

    /// Pages are read by conversation and seq.
    async fn index(
        &mut self,
        name: &str,
        table: &Table,
        conv: &str,
        seq: &str,
    ) -> Result<(), PgError> {
        let page =
            format!("SELECT seq FROM ibid.{name} WHERE conv = 'x' AND seq >= 1 AND seq <= 2");
        let plan = match self.explain(&page).await? {
            Ok(plan) => plan,
            Err(why) => {
                self.fail(format!("ibid.{name} cannot be read: {why}"));
                return Ok(());
            }
        };
        let scanned = nodes(&plan).into_iter().any(|node| {
            let used = node["Index Cond"].as_str().unwrap_or_default();
            [" = ", " >= ", " <= "].iter().all(|by| used.contains(by))
        });
        let column = |shown: &str| match table.column(shown) {
            Some(column) => (column.quoted.clone(), column.number),
            // An index on an expression has the number 0 there.
            None => (format!("({shown})"), 0),
        };
        let ((conv, conv_number), (seq, seq_number)) = (column(conv), column(seq));
        if name == "revision" {
            if !scanned {
                self.fail(format!(
                    "ibid.revision cannot be read through an index on its conv and seq; \
                     CREATE INDEX ON {} ({conv}, {seq}, the column of gseq)",
                    table.name
                ));
            }
            return Ok(());
        }
        let row = self
            .tx
            .query_typed_one(
                "SELECT EXISTS (
                     SELECT FROM pg_index
                     WHERE indrelid = $1 AND indisunique AND indisvalid AND indimmediate
                     AND indpred IS NULL AND indnkeyatts = 2
                     AND indkey[0] = $2 AND indkey[1] = $3)",
                &[
                    (&table.oid, Type::OID),
                    (&conv_number, Type::INT2),
                    (&seq_number, Type::INT2),
                ],
            )
            .await?;
        if !scanned || !row.try_get::<_, bool>(0)? {
            self.fail(format!(
                "ibid.{name} cannot be read through a unique index on its conv and seq; \
                 CREATE UNIQUE INDEX ON {} ({conv}, {seq})",
                table.name
            ));
        }
        Ok(())
    }

    /// Every creation reads the stays of one user.
    async fn stays(&mut self) -> Result<(), PgError> {
        let stays = "SELECT conv FROM ibid.stay WHERE user_id = 'x'";
        let plan = match self.explain(stays).await? {
            Ok(plan) => plan,
            Err(why) => {
                self.fail(format!("ibid.stay cannot be read: {why}"));
                return Ok(());
            }
        };
        for node in nodes(&plan) {
            if node["Node Type"] == "Seq Scan"
                && let Some(table) = table_of(node)
            {
                self.warn(format!(
                    "every export that is created reads the whole of {table}; give it an index \
                     that begins with the column of the user"
                ));
            }
        }
        Ok(())
    }

    /// How PostgreSQL would read, or why it would not.
    async fn explain(&mut self, sql: &str) -> Result<Result<Value, String>, PgError> {
        let tx = self.tx.transaction().await?;
        let explain = format!("EXPLAIN (VERBOSE, COSTS off, FORMAT JSON) {sql}");
        match tx.simple_query(&explain).await {
            Ok(rows) => {
                let text = rows.iter().find_map(|row| match row {
                    SimpleQueryMessage::Row(row) => row.get(0),
                    _ => None,
                });
                let plan: Option<Value> = text.and_then(|text| serde_json::from_str(text).ok());
                let plan = plan.and_then(|mut plan| Some(plan.get_mut(0)?.get_mut("Plan")?.take()));
                Ok(plan.ok_or_else(|| "its plan cannot be read".to_owned()))
            }
            Err(error) if error.as_db_error().is_some() => Ok(Err(describe(&error))),
            Err(error) => Err(error.into()),
        }
    }

    /// What a plan's node scans; `None` if that is no relation.
    async fn table(&self, scan: &Value) -> Result<Option<Table>, PgError> {
        let text = |key: &str| scan[key].as_str();
        let (Some(schema), Some(relation), Some(alias)) =
            (text("Schema"), text("Relation Name"), text("Alias"))
        else {
            return Ok(None);
        };
        let row = self
            .tx
            .query_typed_opt(
                "SELECT c.oid, format('%I.%I', n.nspname, c.relname), quote_ident($3),
                        c.relkind::text, c.relrowsecurity, c.relpersistence = 'u',
                        c.relkind = 'p' OR c.relispartition OR EXISTS (
                            SELECT FROM pg_inherits i WHERE c.oid IN (i.inhrelid, i.inhparent)),
                        pg_stat_get_tuples_updated(c.oid) + pg_stat_get_tuples_deleted(c.oid)
                 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                 WHERE n.nspname = $1 AND c.relname = $2",
                &[
                    (&schema, Type::TEXT),
                    (&relation, Type::TEXT),
                    (&alias, Type::TEXT),
                ],
            )
            .await?;
        let Some(row) = row else {
            return Ok(None);
        };
        let oid: u32 = row.try_get(0)?;
        let columns = self
            .tx
            .query_typed(
                "SELECT quote_ident(a.attname), a.attnum, a.attnotnull,
                        pg_get_expr(d.adbin, d.adrelid)
                 FROM pg_attribute a
                 LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
                 WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped",
                &[(&oid, Type::OID)],
            )
            .await?;
        let columns = columns.iter().map(|row| {
            Ok(Column {
                quoted: row.try_get(0)?,
                number: row.try_get(1)?,
                not_null: row.try_get(2)?,
                default: row.try_get(3)?,
            })
        });
        Ok(Some(Table {
            oid,
            name: row.try_get(1)?,
            alias: row.try_get(2)?,
            kind: row.try_get(3)?,
            row_security: row.try_get(4)?,
            unlogged: row.try_get(5)?,
            partitioned: row.try_get(6)?,
            changes: row.try_get(7)?,
            columns: columns.collect::<Result<_, tokio_postgres::Error>>()?,
        }))
    }

    fn fail(&mut self, what: String) {
        self.found.failures.push(what);
    }

    fn warn(&mut self, what: String) {
        self.found.warnings.push(what);
    }
}

/// A table that a view reads. Names are quoted where SQL needs that.
struct Table {
    oid: u32,
    name: String,
    alias: String,
    kind: String,
    row_security: bool,
    unlogged: bool,
    partitioned: bool,
    changes: i64,
    columns: Vec<Column>,
}

struct Column {
    quoted: String,
    number: i16,
    not_null: bool,
    default: Option<String>,
}

impl Table {
    /// The column that a plan's output `shown` is, if it is nothing but a column.
    fn column(&self, shown: &str) -> Option<&Column> {
        let name = shown.strip_prefix(&self.alias)?.strip_prefix('.')?;
        self.columns.iter().find(|column| column.quoted == name)
    }
}

/// A plan's node and all below it.
fn nodes(plan: &Value) -> Vec<&Value> {
    let mut all = vec![plan];
    for below in plan["Plans"].as_array().into_iter().flatten() {
        all.extend(nodes(below));
    }
    all
}

fn table_of(node: &Value) -> Option<String> {
    let (schema, name) = (node["Schema"].as_str()?, node["Relation Name"].as_str()?);
    Some(format!("{schema}.{name}"))
}

/// A node as a reader of plans knows it.
fn spell(node: &Value) -> String {
    let mut text = node["Node Type"].as_str().unwrap_or("?").to_owned();
    if let Some(table) = table_of(node) {
        text.push_str(&format!(" of {table}"));
    }
    for condition in conditions(node) {
        text.push_str(&format!(" by {condition}"));
    }
    text
}

/// By what a node leaves rows out.
fn conditions(node: &Value) -> impl Iterator<Item = &str> {
    let members = node.as_object().into_iter().flatten();
    members
        .filter(|(key, _)| key.ends_with("Filter") || key.ends_with("Cond"))
        .filter_map(|(_, condition)| condition.as_str())
}
