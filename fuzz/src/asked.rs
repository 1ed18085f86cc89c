//! Requests made of a tape: mostly right, some with a part that is not, some with bytes changed.

use std::collections::BTreeMap;

use certk_rs::Kind;
use certk_rs::half::{bf16, f16};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Map, Value, json};

use super::heads::{Matrices, Sight};
use super::rows;
use super::stored::Stored;
use super::tape::Tape;

/// What sessions are called.
pub(crate) const NAMES: [&str; 3] = ["a", "b-2", "c.d_3"];
const DTYPES: [&str; 4] = ["f32", "f64", "f16", "bf16"];
const STORED: [Dtype; 4] = [Dtype::F32, Dtype::F64, Dtype::F16, Dtype::BF16];

/// What is asked.
#[derive(Debug)]
pub(crate) enum What {
    Select(Scores),
    Put,
    Append,
    Truncate,
    Evict,
    Search(Rows),
    Attend(Rows),
    Persist,
    Show,
    Delete,
    List,
    /// The page, the description, what is for operators.
    Open,
    /// There is no such route, method or name.
    Nothing,
}

impl What {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            What::Select(_) => "select",
            What::Put => "put",
            What::Append => "append",
            What::Truncate => "truncate",
            What::Evict => "evict",
            What::Search(_) => "search",
            What::Attend(_) => "attention",
            What::Persist => "persist",
            What::Show => "show",
            What::Delete => "delete",
            What::List => "list",
            What::Open => "open",
            What::Nothing => "nothing",
        }
    }
}

/// Rows of scores.
#[derive(Debug)]
pub(crate) struct Scores {
    pub(crate) numbers: Vec<f64>,
    pub(crate) n: usize,
    pub(crate) kind: Kind,
    pub(crate) scale: f64,
    pub(crate) eps: f64,
    /// Whether nothing but the budget limits what is kept.
    pub(crate) plain: bool,
}

/// Queries.
#[derive(Debug)]
pub(crate) struct Rows {
    pub(crate) queries: Matrices,
    pub(crate) sight: Sight,
    pub(crate) scale: Option<f64>,
    pub(crate) eps: Option<Vec<f64>>,
    pub(crate) top: Option<usize>,
}

/// A request.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) method: &'static str,
    pub(crate) path: String,
    pub(crate) query: String,
    pub(crate) headers: Vec<(&'static str, &'static str)>,
    pub(crate) body: Vec<u8>,
    pub(crate) what: What,
    /// The session that it is about.
    pub(crate) name: Option<&'static str>,
    /// Whether it brings the token.
    pub(crate) knows: bool,
    /// Whether nothing of it can be refused as wrong.
    pub(crate) right: bool,
    /// Whether bytes of it are no longer what they were made as.
    pub(crate) spoiled: bool,
}

/// What a session holds.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) tensors: Tensors,
    pub(crate) number: u64,
}

impl Held {
    /// That the service says the same.
    pub(crate) fn check(&self, name: &str, said: &Value) {
        let Tensors { keys, values } = &self.tensors;
        assert_eq!(said["name"], name);
        assert_eq!(said["version"], self.number, "{said}");
        assert_eq!(said["keys"], keys.rows, "{said}");
        assert_eq!(said["heads"], keys.heads);
        assert_eq!(said["dim"], keys.dim);
        assert_eq!(said["dtype"], DTYPES[keys.stored.dtype()]);
        assert_eq!(said["values_dim"], json!(values.as_ref().map(|values| values.dim)));
    }
}

/// Keys, and values if there are any.
#[derive(Debug)]
pub(crate) struct Tensors {
    pub(crate) keys: Matrices,
    pub(crate) values: Option<Matrices>,
}

impl Tensors {
    pub(crate) fn n(&self) -> usize {
        self.keys.rows
    }

    /// What a body says that was taken.
    pub(crate) fn read(asked: &Asked) -> Option<Self> {
        if asked.says_json() {
            let body: Value = serde_json::from_slice(&asked.body).ok()?;
            let dtype = body.get("dtype").map_or(Some("f32"), Value::as_str)?;
            let dtype = DTYPES.iter().position(|name| *name == dtype)?;
            let one = |shape: &str, numbers: &str| -> Option<Matrices> {
                let numbers: Vec<f64> = serde_json::from_value(body[numbers].clone()).ok()?;
                let shape = match &body[shape] {
                    Value::String(text) => {
                        text.split(',').map(|axis| axis.trim().parse().ok()).collect()
                    }
                    list => serde_json::from_value(list.clone()).ok(),
                };
                let shape: Vec<usize> = shape?;
                Some(Matrices::of(Stored::narrowed(&numbers, dtype), shape.try_into().ok()?))
            };
            return Some(Tensors {
                keys: one("shape", "keys")?,
                values: one("values_shape", "values"),
            });
        }
        let file = SafeTensors::deserialize(&asked.body).ok()?;
        let one = |name: &str| {
            let tensor = file.tensor(name).ok()?;
            let dtype = STORED.iter().position(|stored| *stored == tensor.dtype())?;
            let stored = Stored::of_bytes(tensor.data(), dtype);
            Some(Matrices::of(stored, tensor.shape().try_into().ok()?))
        };
        Some(Tensors { keys: one("keys")?, values: one("values") })
    }

    pub(crate) fn append(&mut self, more: Tensors) {
        self.keys = self.keys.followed_by(&more.keys);
        self.values = match (&self.values, &more.values) {
            (Some(values), Some(more)) => Some(values.followed_by(more)),
            (None, None) => None,
            _ => panic!("values where there were none"),
        };
    }

    /// Only those positions.
    pub(crate) fn only(&mut self, stays: impl Fn(usize) -> bool) {
        self.keys = self.keys.only(&stays);
        self.values = self.values.as_ref().map(|values| values.only(&stays));
    }

    fn body(&self, tape: &mut Tape<'_>, as_json: bool) -> Vec<u8> {
        let all = [Some(("keys", &self.keys)), self.values.as_ref().map(|of| ("values", of))];
        if as_json {
            let mut said = Map::new();
            said.insert("dtype".into(), DTYPES[self.keys.stored.dtype()].into());
            for (name, of) in all.into_iter().flatten() {
                let shape = if name == "keys" { "shape" } else { "values_shape" };
                said.insert(shape.into(), json!([of.heads, of.rows, of.dim]));
                said.insert(name.into(), json!(of.stored.wide()));
            }
            return Value::Object(said).to_string().into();
        }
        let bytes: Vec<_> =
            all.into_iter().flatten().map(|(name, of)| (name, of, of.stored.bytes())).collect();
        let odd = tape.rarely(24);
        let views = bytes.iter().map(|(name, of, bytes)| {
            let shape = vec![of.heads, of.rows, of.dim];
            let view = TensorView::new(STORED[of.stored.dtype()], shape, bytes).unwrap();
            (if odd && *name == "values" { "value" } else { name }, view)
        });
        safetensors::serialize(views, None).unwrap()
    }
}

/// A number of options in the order in which they are said.
#[derive(Default)]
struct Said(Vec<(&'static str, Value)>);

impl Said {
    fn add(&mut self, name: &'static str, value: impl Into<Value>) {
        self.0.push((name, value.into()));
    }

    /// As the query has them.
    fn query(&self) -> String {
        let plain = |value: &Value| match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let text = |value: &Value| match value {
            Value::Array(list) => list.iter().map(plain).collect::<Vec<_>>().join(","),
            other => plain(other),
        };
        let each = self.0.iter().map(|(name, value)| format!("{name}={}", text(value)));
        each.collect::<Vec<_>>().join("&")
    }
}

impl Asked {
    pub(crate) fn show(name: &'static str) -> Self {
        let mut asked = Asked::bare("GET", format!("/v1/sessions/{name}"), What::Show);
        asked.name = Some(name);
        asked
    }

    fn bare(method: &'static str, path: String, what: What) -> Self {
        Asked {
            method,
            path,
            query: String::new(),
            headers: Vec::new(),
            body: Vec::new(),
            what,
            name: None,
            knows: true,
            right: true,
            spoiled: false,
        }
    }

    pub(crate) fn new(tape: &mut Tape<'_>, held: &BTreeMap<&'static str, Held>) -> Self {
        let mut asked = Self::made(tape, held);
        match tape.below(32) {
            27 => asked.knows = false,
            28 => asked.headers.push(("x-timeout-ms", "0")),
            29 => {
                asked.headers.push(("x-timeout-ms", tape.one_of(&["900000", "soon", "-1", ""])));
                asked.right = false;
            }
            30 => asked.spoil_query(tape),
            31 => asked.spoil_body(tape),
            _ => {}
        }
        asked
    }

    fn made(tape: &mut Tape<'_>, held: &BTreeMap<&'static str, Held>) -> Self {
        // Nothing can be done with sessions before there is one.
        let way = if held.is_empty() { 2 - tape.below(24) / 20 * 2 } else { 2 + tape.below(30) };
        let name = match held.keys().nth(tape.below(held.len().max(1))) {
            Some(name) if way > 2 && !tape.rarely(24) => *name,
            _ => tape.one_of(&NAMES),
        };
        let of = held.get(name).map(|held| &held.tensors);
        let path = |rest: &str| format!("/v1/sessions/{name}{rest}");
        let mut asked = match way {
            0 => Self::select(tape),
            1 | 2 => {
                let tensors = tensors(tape, None);
                let mut asked = Self::bare("PUT", path(""), What::Put);
                asked.bring(tape, &tensors);
                asked
            }
            3..=5 => Self::select(tape),
            6..=9 => {
                let tensors = tensors(tape, of);
                let mut asked = Self::bare("POST", path("/append"), What::Append);
                asked.bring(tape, &tensors);
                asked.right &= of.is_some();
                asked
            }
            10 | 11 => {
                let n = of.map_or(0, Tensors::n);
                let keys = tape.below(n + 1) + usize::from(tape.rarely(12));
                let mut asked = Self::bare("POST", path("/truncate"), What::Truncate);
                asked.query = format!("keys={keys}");
                asked.right = keys <= n;
                asked
            }
            12 | 13 => {
                let n = of.map_or(0, Tensors::n);
                let count = tape.below(12);
                let most = if tape.rarely(12) { n + 2 } else { n };
                let gone: Vec<usize> = (0..count).map(|_| tape.below(most.max(1))).collect();
                let mut asked = Self::bare("POST", path("/evict"), What::Evict);
                asked.right = gone.iter().all(|at| *at < n);
                asked.body = json!({"positions": gone}).to_string().into();
                asked
            }
            14..=21 => Self::of_rows(tape, of, path("/search"), false),
            22..=26 => {
                let attends = of.is_none_or(|of| of.values.is_some()) || tape.rarely(12);
                Self::of_rows(
                    tape,
                    of,
                    path(if attends { "/attention" } else { "/search" }),
                    attends,
                )
            }
            27 => Self::bare("POST", path("/persist"), What::Persist),
            28 => Self::bare("GET", path(""), What::Show),
            29 => Self::bare("DELETE", path(""), What::Delete),
            30 => {
                let path =
                    tape.one_of(&["/v1/sessions", "/metrics", "/healthz", "/", "/openapi.json"]);
                let what = if path == "/v1/sessions" { What::List } else { What::Open };
                Self::bare("GET", path.into(), what)
            }
            _ => {
                let paths = [
                    "/v2",
                    "/v1/sessions/",
                    "/v1/sessions/%FF",
                    "/v1/sessions/..%2Fa",
                    "/v1/select",
                ];
                let mut asked = Self::bare("GET", tape.one_of(&paths).into(), What::Nothing);
                asked.right = false;
                asked
            }
        };
        let about =
            !matches!(asked.what, What::Select(_) | What::List | What::Open | What::Nothing);
        asked.name = about.then_some(name);
        let changes = matches!(
            asked.what,
            What::Append | What::Truncate | What::Evict | What::Search(_) | What::Attend(_)
        );
        if changes && !asked.says_json() && tape.rarely(12) {
            let number = held.get(name).map_or(0, |held| held.number);
            let number = number + u64::from(tape.rarely(2));
            asked.also(format!("if_version={number}"));
        }
        if tape.rarely(4) {
            let accept = ["application/json", "application/vnd.safetensors", "*/*"];
            asked.headers.push(("accept", tape.one_of(&accept)));
        }
        if matches!(asked.what, What::Evict) {
            asked.headers.push(("content-type", "application/json"));
        }
        asked
    }

    /// Puts tensors into its body.
    fn bring(&mut self, tape: &mut Tape<'_>, tensors: &Tensors) {
        let as_json = tape.rarely(4);
        if as_json {
            self.headers.push(("content-type", "application/json"));
        }
        self.body = tensors.body(tape, as_json);
        // Whether they fit is asked of what was taken.
        self.right = false;
    }

    /// Puts numbers, and what is said of them, into its body and its query.
    fn ask(&mut self, tape: &mut Tape<'_>, name: &str, mut said: Said, stored: &Stored) {
        // JSON has no infinities.
        let finite = stored.wide().iter().all(|number| number.is_finite());
        let as_json = tape.rarely(4) && (finite || tape.rarely(8));
        let usual = usize::from(as_json);
        if stored.dtype() != usual || tape.rarely(4) {
            said.add("dtype", DTYPES[stored.dtype()]);
        }
        if as_json {
            let charset = tape.rarely(2);
            let kind = ["application/json", "application/json; charset=utf-8"];
            self.headers.push(("content-type", kind[usize::from(charset)]));
            let mut body: Map<_, _> =
                said.0.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
            self.right &= finite;
            body.insert(name.into(), json!(stored.wide()));
            self.body = Value::Object(body).to_string().into();
        } else {
            self.query = said.query();
            self.body = stored.bytes();
        }
    }

    fn select(tape: &mut Tape<'_>) -> Self {
        let n = rows::length(tape).min(3000);
        let batch: Vec<usize> = match tape.below(4) {
            0 => vec![],
            1 => vec![1],
            2 => vec![1 + tape.below(4)],
            _ => vec![1 + tape.below(2), 1 + tape.below(3)],
        };
        let mut shape = batch.clone();
        shape.push(n);
        let mut stored = Stored::new(tape, shape.iter().product());
        let kind = tape.one_of(&[Kind::Logits, Kind::Logits, Kind::LogProbs, Kind::Probs]);
        if kind == Kind::Probs {
            let positive: Vec<f64> = stored.wide().iter().map(|x| x.abs()).collect();
            stored = Stored::narrowed(&positive, stored.dtype());
        }
        let mut said = Said::default();
        said.add("shape", shape);
        let eps = eps(tape);
        said.add("eps", eps);
        if kind != Kind::Logits {
            said.add("kind", if kind == Kind::Probs { "probs" } else { "logprobs" });
        }
        let mut scale = 1.0;
        if kind == Kind::Logits && tape.rarely(3) {
            scale = tape.one_of(&[0.125, -1.0, 0.0, 1e-30, 3.0]);
            said.add("scale", scale);
        }
        let before = said.0.len();
        if tape.rarely(3) {
            let count = tape.below(20);
            match tape.below(6) {
                0 => said.add("min_keep", count),
                1 => said.add("max_keep", count),
                2 => said.add("max_fraction", f64::from(tape.u8()) / 200.0),
                3 => said.add("keep_first", count),
                4 => said.add("keep_last", count),
                _ => said.add("block_size", count),
            }
        }
        let plain = said.0.len() == before;
        if tape.rarely(4) {
            said.add("prove_minimal", true);
        }
        let mut asked = Self::bare("POST", "/v1/select".into(), What::List);
        asked.ask(tape, "scores", said, &stored);
        let numbers = stored.wide();
        let usual = numbers.iter().all(|x| x.abs() < 1e6 && x.abs() > 1e-6) && n > 0;
        asked.right &= plain && usual && (0.0..1.0).contains(&eps);
        asked.what = What::Select(Scores { numbers, n, kind, scale, eps, plain });
        asked
    }

    fn of_rows(tape: &mut Tape<'_>, of: Option<&Tensors>, path: String, attends: bool) -> Self {
        let (heads, n, dim, dtype) = of.map_or((1, 4, 2, 0), |of| {
            (of.keys.heads, of.keys.rows, of.keys.dim, of.keys.stored.dtype())
        });
        let odd = tape.rarely(24);
        let heads = heads * (1 + tape.below(2)) + usize::from(odd);
        let dtype = if tape.rarely(4) { tape.below(4) } else { dtype };
        let m = tape.below(5) + usize::from(!tape.rarely(24));
        let queries = Matrices::new(tape, [heads, m, dim], dtype, false);
        let count = heads * m;
        let mut said = Said::default();
        said.add("shape", vec![heads, m, dim]);
        let budgets = |tape: &mut Tape<'_>| {
            let each = tape.rarely(4);
            (0..if each { count } else { 1 }).map(|_| eps(tape)).collect::<Vec<f64>>()
        };
        let (mut top, mut budget, mut right) = (None, None, !odd);
        match tape.below(if attends { 2 } else { 6 }) {
            1 if attends => said.add("out_tol", tape.one_of(&[1.0, 0.1, 30.0, 0.01, 1e-3, 0.0])),
            4 => {
                let k = tape.below(12);
                said.add("rule", "topk");
                said.add("k", k);
                (top, right) = (Some(k), right && k > 0);
            }
            way => {
                let list = budgets(tape);
                right &= list.iter().all(|eps| (0.0..1.0).contains(eps)) && !list.is_empty();
                said.add("eps", list.clone());
                budget = Some(list);
                if way == 5 {
                    said.add("rule", "gap");
                    right = false;
                }
            }
        }
        let scale = tape.rarely(6).then(|| tape.one_of(&[1.0, -0.5, 0.0, 1e-30, 4.0]));
        if let Some(scale) = scale {
            said.add("scale", scale);
        }
        let causal = tape.rarely(3);
        if causal {
            said.add("causal", true);
        }
        let lengths = tape.rarely(4).then(|| {
            let each = tape.rarely(2) && count > 1;
            (0..if each { count } else { 1 }).map(|_| tape.below(n + 1) as i64).collect::<Vec<_>>()
        });
        if let Some(lengths) = &lengths {
            said.add("lengths", lengths.clone());
        }
        if attends && tape.rarely(3) {
            said.add("precision", tape.one_of(&DTYPES));
        }
        if attends && tape.rarely(2) {
            said.add("even_if_slower", true);
        }
        if !attends && tape.rarely(6) {
            said.add("max_scored", tape.below(30));
        }
        let mut asked = Self::bare("POST", path, What::List);
        asked.ask(tape, "queries", said, &queries.stored);
        let small = |of: &Matrices| of.stored.wide().iter().all(|x| x.abs() < 1e4);
        let fits = of.is_some_and(|of| small(&of.keys) && !(attends && of.values.is_none()));
        asked.right &= right && fits && small(&queries) && !attends && m > 0;
        let sight = Sight { causal, lengths, mask: None };
        let rows = Rows { queries, sight, scale, eps: budget, top };
        asked.what = if attends { What::Attend(rows) } else { What::Search(rows) };
        asked
    }

    fn also(&mut self, more: String) {
        if !self.query.is_empty() {
            self.query.push('&');
        }
        self.query += &more;
    }

    pub(crate) fn says_json(&self) -> bool {
        self.headers.iter().any(|(_, value)| value.starts_with("application/json"))
            && self.headers.iter().any(|(name, _)| *name == "content-type")
    }

    /// Whether a name stands in its query, or in what may be JSON.
    pub(crate) fn says(&self, name: &str) -> bool {
        self.query.contains(name) || String::from_utf8_lossy(&self.body).contains(name)
    }

    /// A number in its query.
    pub(crate) fn number(&self, name: &str) -> Option<usize> {
        let text =
            self.query.split('&').find_map(|part| part.strip_prefix(name)?.strip_prefix('='));
        text?.parse().ok()
    }

    /// Another word, a number that is none, a byte.
    fn spoil_query(&mut self, tape: &mut Tape<'_>) {
        (self.right, self.spoiled) = (false, true);
        if tape.rarely(2) {
            let odd = [
                "shape=2,2",
                "shape=",
                "eps=nan",
                "eps=-1",
                "eps=0.1,0.2",
                "k=3",
                "rule=best",
                "lengths=-1",
                "lengths=18446744073709551615",
                "shape=9223372036854775807,8",
                "dtype=f8",
                "scale=inf",
                "scale=1e308",
                "if_version=1",
                "causal=maybe",
                "keys=1",
                "max_keep=0",
                "block_size=0",
                "min_keep=18446744073709551615",
                "%zz=1",
                "x=y",
            ];
            let odd = tape.one_of(&odd);
            self.also(odd.into());
            return;
        }
        let mut bytes = std::mem::take(&mut self.query).into_bytes();
        spoil(tape, &mut bytes);
        bytes.retain(|byte| byte.is_ascii_graphic() && *byte != b'#');
        self.query = String::from_utf8(bytes).unwrap();
    }

    fn spoil_body(&mut self, tape: &mut Tape<'_>) {
        (self.right, self.spoiled) = (false, true);
        spoil(tape, &mut self.body);
    }
}

fn eps(tape: &mut Tape<'_>) -> f64 {
    let usual = [0.1, 0.01, 0.5, 1e-3, 0.05, 1e-6, 0.0, 0.99, 0.3, 1e-12, 0.2, 1e-300];
    if tape.rarely(48) { tape.one_of(&[1.0, -0.1, 7.0]) } else { tape.one_of(&usual) }
}

/// Keys and values; mostly such as may follow those of a session.
fn tensors(tape: &mut Tape<'_>, after: Option<&Tensors>) -> Tensors {
    let n = match tape.below(4) {
        0 => tape.below(6),
        1 => 1 + tape.below(20),
        2 => 1 + tape.below(70),
        _ => tape.one_of(&[16, 64, 128, 256, 300]) + tape.below(3) - 1,
    };
    if let Some(after) = after.filter(|_| !tape.rarely(16)) {
        let dtype = after.keys.stored.dtype();
        let mut like = |of: &Matrices| Matrices::new(tape, [of.heads, n, of.dim], dtype, false);
        let keys = like(&after.keys);
        return Tensors { keys, values: after.values.as_ref().map(like) };
    }
    let heads = 1 + tape.below(3);
    let dim = tape.one_of(&[4, 1, 2, 3, 8, 15, 16, 17, 24, 64]);
    let dtype = if tape.rarely(24) { 1 } else { tape.one_of(&[0, 2, 3]) };
    let keys = Matrices::new(tape, [heads, n, dim], dtype, false);
    let width = tape.one_of(&[4, 1, 3, 8, 0]);
    let values = (width > 0).then(|| Matrices::new(tape, [heads, n, width], dtype, false));
    Tensors { keys, values }
}

/// Something that was bytes of a kind, and may be no longer.
fn spoil(tape: &mut Tape<'_>, bytes: &mut Vec<u8>) {
    for _ in 0..=tape.below(3) {
        let (at, with) = (tape.below(bytes.len().max(1)), tape.u8());
        match tape.below(7) {
            0 => bytes.truncate(at),
            1 => bytes.extend(vec![with; 1 + tape.below(40)]),
            2 if !bytes.is_empty() => bytes[at] = with,
            3 if !bytes.is_empty() => bytes[at] ^= 1 << tape.below(8),
            4 => bytes.insert(at, with),
            // Of a safetensors file: how long its header is.
            5 => {
                let length = tape.one_of(&[0, 1, 7, u64::MAX, 1 << 40, 100_000_001]);
                bytes.splice(..bytes.len().min(8), length.to_le_bytes());
            }
            // Numbers in headers and JSON.
            _ => {
                for byte in bytes.iter_mut().filter(|byte| byte.is_ascii_digit()).take(300) {
                    if tape.rarely(6) {
                        *byte = tape.one_of(b"0123456789.-e");
                    }
                }
            }
        }
    }
}

impl Stored {
    /// Little-endian.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        match self {
            Stored::F32(list) => list.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Stored::F64(list) => list.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Stored::F16(list) => list.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Stored::Bf16(list) => list.iter().flat_map(|x| x.to_le_bytes()).collect(),
        }
    }

    /// The same back.
    fn of_bytes(bytes: &[u8], dtype: usize) -> Self {
        let two = || bytes.chunks_exact(2).map(|x| [x[0], x[1]]);
        match dtype {
            0 => Stored::F32(
                bytes.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect(),
            ),
            1 => Stored::F64(
                bytes.chunks_exact(8).map(|x| f64::from_le_bytes(x.try_into().unwrap())).collect(),
            ),
            2 => Stored::F16(two().map(f16::from_le_bytes).collect()),
            _ => Stored::Bf16(two().map(bf16::from_le_bytes).collect()),
        }
    }
}

impl Matrices {
    /// What came in with a shape.
    fn of(stored: Stored, [heads, rows, dim]: [usize; 3]) -> Self {
        Matrices { stored, heads, rows, dim, shape: vec![heads, rows, dim] }
    }

    /// Each head's rows, then those of another.
    fn followed_by(&self, more: &Self) -> Self {
        assert_eq!((self.heads, self.dim), (more.heads, more.dim));
        let (first, second) = (self.stored.wide(), more.stored.wide());
        let (one, two) = (self.rows * self.dim, more.rows * more.dim);
        let numbers: Vec<f64> = (0..self.heads)
            .flat_map(|head| first[head * one..][..one].iter().chain(&second[head * two..][..two]))
            .copied()
            .collect();
        let stored = Stored::narrowed(&numbers, self.stored.dtype());
        Self::of(stored, [self.heads, self.rows + more.rows, self.dim])
    }

    /// Only those rows of each head.
    fn only(&self, stays: impl Fn(usize) -> bool) -> Self {
        let wide = self.stored.wide();
        let rows = wide.chunks(self.dim).enumerate().filter(|(at, _)| stays(at % self.rows));
        let numbers: Vec<f64> = rows.flat_map(|(_, row)| row).copied().collect();
        let count = (0..self.rows).filter(|at| stays(*at)).count();
        let stored = Stored::narrowed(&numbers, self.stored.dtype());
        Self::of(stored, [self.heads, count, self.dim])
    }
}
