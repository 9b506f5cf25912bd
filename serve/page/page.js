"use strict";
// Labels, texts and answers are data. They become text nodes (append, textContent) and never markup.

const element = (id) => document.getElementById(id);
const percent = (share) => (100 * share).toFixed(1) + "\u00a0%";
const MOST_ROWS = 5;
const COLOURS = 8;
let about = null;
let shown = 0; // the newest question; an older one's answer is not shown over it

function make(name, properties = {}, ...children) {
  const made = document.createElement(name);
  const {share, ...plain} = properties;
  Object.assign(made, plain);
  if (share !== undefined) made.style.setProperty("--share", String(Math.min(1, Math.max(0, share))));
  made.append(...children);
  return made;
}

// ------------------------------------------------------------------------------------------------------------- parts

function bar(share, threshold) {
  const track = make("div", {className: "track"}, make("i", {share}));
  if (threshold !== null) track.append(make("b", {share: threshold}));
  return track;
}

// A label may break behind the marks that join its words.
const breakable = (label) => label.split(/(?<=[_=/.-])/).flatMap((part) => [part, make("wbr")]).slice(0, -1);

// Rows of {label, score}, the first few; the rest behind a button.
function ranking(rows, thresholds = null) {
  const line = ({label, score}) => {
    const threshold = thresholds === null ? null : thresholds[label];
    const given = threshold === null ? null : score >= threshold;
    const found = make("tr", {className: given === null ? "" : given ? "given" : "left"});
    found.append(
      make("th", {scope: "row", dir: "auto"}, given ? "✓ " : "", ...breakable(label)),
      make("td", {className: "bar"}, bar(score, threshold)),
      make("td", {className: "figure"}, percent(score)),
    );
    return found;
  };
  const body = make("tbody", {}, ...rows.slice(0, MOST_ROWS).map(line));
  const parts = [make("table", {}, body)];
  if (rows.length > MOST_ROWS) {
    const more = make("button", {type: "button", className: "more"}, `Show all ${rows.length}`);
    more.addEventListener("click", () => {
      body.append(...rows.slice(MOST_ROWS).map(line));
      body.rows[MOST_ROWS].tabIndex = -1;
      body.rows[MOST_ROWS].focus();
      more.remove();
    });
    parts.push(more);
  }
  return parts;
}

const headline = (text) => make("p", {className: "headline", dir: "auto"}, text);

// The text with marks at spans that do not overlap. Places are characters as Python counts them: an emoji is one.
function marked(text, spans, mark) {
  const characters = Array.from(text);
  const slice = (start, end) => characters.slice(start, end).join("");
  const found = make("blockquote", {dir: "auto"});
  let done = 0;
  for (const span of [...spans].sort((a, b) => a.start - b.start)) {
    if (span.start < done) continue;
    found.append(slice(done, span.start), mark(slice(span.start, span.end), span));
    done = span.end;
  }
  found.append(slice(done));
  return found;
}

// ------------------------------------------------------------------------------------------------- by kind of answer

const colours = new Map();
function colour(type) {
  if (!colours.has(type)) colours.set(type, `c${colours.size % COLOURS}`);
  return colours.get(type);
}

function renderClasses(rows) {
  return [headline(`${rows[0].label}, ${percent(rows[0].score)}`), ...ranking(rows)];
}

function renderLabels(rows) {
  const given = rows.filter((row) => row.score >= about.thresholds[row.label]).map((row) => row.label);
  const note = "A label is given from its threshold on (the dashed line).";
  return [headline(given.join(", ") || "No label"), ...ranking(rows, about.thresholds), make("p", {className: "note"}, note)];
}

function renderHeads(heads) {
  return Object.entries(heads).flatMap(([name, rows]) => [
    make("h3", {dir: "auto"}, name), headline(`${rows[0].label}, ${percent(rows[0].score)}`), ...ranking(rows),
  ]);
}

function renderNumber(value) {
  const digits = (number) => Number(number.toPrecision(4)).toString();
  if (about.scale === null) return [headline(digits(value))];
  const {lowest, highest, step} = about.scale;
  const parts = [];
  if (step !== null) {
    const grade = lowest + step * Math.round((Math.min(highest, Math.max(lowest, value)) - lowest) / step);
    parts.push(make("p", {className: "note"}, `The nearest grade is ${digits(grade)}.`));
  }
  if (value < lowest || value > highest) {
    parts.push(make("p", {className: "note"}, "It lies outside of the training scores."));
  }
  const track = make("div", {className: "track"}, make("b", {share: (value - lowest) / (highest - lowest)}));
  track.setAttribute("role", "img");
  track.setAttribute("aria-label", `${digits(value)} on a scale from ${digits(lowest)} to ${digits(highest)}`);
  const ends = make("div", {className: "ends"}, make("span", {}, digits(lowest)), make("span", {}, digits(highest)));
  return [headline(digits(value)), make("div", {className: "scale"}, track, ends), ...parts];
}

function renderTags(entities, asked) {
  const text = typeof asked === "string" ? asked : asked.text;
  const types = [...new Set(entities.map((entity) => entity.entity_group))];
  const mark = (part, {entity_group: type, score}) =>
    make("mark", {className: `entity ${colour(type)}`, title: percent(score)}, part, make("small", {}, type));
  const parts = [headline(entities.length ? `${entities.length} found` : "Nothing found"), marked(text, entities, mark)];
  if (types.length) {
    parts.push(make("p", {}, ...types.map((type) => make("span", {className: `tag ${colour(type)}`}, type))));
    const rows = entities.map((entity) => ({label: `${entity.word} · ${entity.entity_group}`, score: entity.score}));
    parts.push(...ranking(rows));
  }
  return parts;
}

function renderSpans(found, asked) {
  const spans = found.answer ? [found] : [];
  const mark = (part) => make("mark", {className: "span"}, part);
  const title = found.answer ? found.answer : "The context holds no answer";
  return [
    headline(title), make("p", {className: "note"}, `Score ${percent(found.score)}`), marked(asked.context, spans, mark),
  ];
}

function renderSummary(found, asked) {
  const text = typeof asked === "string" ? asked : asked.text;
  const mark = (part, {score}) => make("mark", {className: "for", share: 0.25 + 0.75 * score, title: percent(score)}, part);
  return [
    make("p", {className: "headline", dir: "auto"}, found.summary_text),
    make("h3", {}, "In the document"), marked(text, found.sentences, mark),
  ];
}

function renderTokens(masks) {
  if (!masks.length) return [headline("The text has no mask")];
  const named = ({token, token_str: text}) => text.trim() ? text : `token ${token}`;
  const best = masks.map((pieces) => named(pieces[0])).join(", ");
  return [headline(best), ...masks.flatMap((pieces, place) => [
    make("h3", {}, `Mask ${place + 1}`),
    ...ranking(pieces.map((piece) => ({label: named(piece), score: piece.score}))),
  ])];
}

const RENDERERS = {
  classes: renderClasses,
  labels: renderLabels,
  heads: renderHeads,
  number: renderNumber,
  tags: renderTags,
  spans: renderSpans,
  summary: renderSummary,
  tokens: renderTokens,
};

// A kind that this page does not know is shown as it came.
const renderOther = (answer) => [make("pre", {}, JSON.stringify(answer, null, 1))];

// ------------------------------------------------------------------------------------------------------ explanations

const signed = (value) => (value < 0 ? "−" : "+") + Math.abs(value).toPrecision(2);

function renderWhy({answers}, asked) {
  if (!answers.length) return [make("p", {className: "note"}, "There is nothing to explain in this answer.")];
  const texts = typeof asked === "string" ? {[about.fields[0]]: asked} : asked;
  const sides = about.output === "number" ? ["raises it", "lowers it"] : ["for it", "against it"];
  return answers.map(({label, start, end, value, baseline, completeness_error: error, words, sentences}, place) => {
    const parts = [];
    const most = Math.max(...words.map((word) => Math.abs(word.attribution)), Number.MIN_VALUE);
    const mark = (part, {attribution}) => make("mark", {
      className: attribution < 0 ? "against" : "for", share: Math.abs(attribution) / most, title: signed(attribution),
    }, part);
    const entity = start === undefined ? "" : `${Array.from(texts[about.fields[0]]).slice(start, end).join("")} · `;
    const title = make("h3", {dir: "auto"}, `What “${entity}${label}” rests on`);
    for (const [field, text] of Object.entries(texts)) {
      const own = words.filter((word) => word.field === field && Math.abs(word.attribution) > 0.05 * most);
      parts.push(marked(text, own, mark));
    }
    parts.push(make("p", {className: "note"},
      make("mark", {className: "for", share: 0.6}, sides[0]), " ", make("mark", {className: "against", share: 0.6}, sides[1]),
      ` · from ${baseline.toPrecision(3)} without words to ${value.toPrecision(3)}`
      + (error === null ? "" : `, completeness error ${percent(error)}`)));
    const rows = (sentences.length > 1 ? sentences : words).map((part) => [part.sentence ?? part.word, part.attribution]);
    rows.sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
    const lines = rows.slice(0, 2 * MOST_ROWS).map(([part, attribution]) => make("tr", {},
      make("th", {scope: "row", dir: "auto"}, part), make("td", {className: "figure"}, signed(attribution))));
    parts.push(make("details", {},
      make("summary", {}, sentences.length > 1 ? "Sentences, the strongest first" : "Words, the strongest first"),
      make("table", {}, make("tbody", {}, ...lines))));
    // Several entities would fill the page: the first one is open.
    return make("details", {open: place === 0 || answers.length === 2}, make("summary", {}, title), ...parts);
  });
}

// --------------------------------------------------------------------------------------------------- asking the model

function headers() {
  const key = element("key").value.trim();
  return key ? {"content-type": "application/json", authorization: `Bearer ${key}`} : {"content-type": "application/json"};
}

function asked() {
  const texts = about.fields.map((field) => element(`text-${field}`).value);
  return texts.length === 1 ? texts[0] : Object.fromEntries(about.fields.map((field, place) => [field, texts[place]]));
}

function body(inputs) {
  const parameters = {};
  if (element("why").checked) parameters.explain = true;
  if (element("words").value) parameters.max_words = Number(element("words").value);
  return Object.keys(parameters).length ? {inputs, parameters} : {inputs};
}

function say(text, bad = false) {
  element("status").textContent = text;
  element("status").className = bad ? "bad" : "";
}

// Where the answer lies below the window, as on a phone.
function show(part) {
  if (part.getBoundingClientRect().top > innerHeight - 100) part.scrollIntoView({block: "start"});
}

async function refusal(response) {
  if (response.status === 401 || response.status === 403) {
    element("key-field").hidden = false;
    element("key").focus();
  }
  const found = await response.json().catch(() => null);
  const wait = response.headers.get("retry-after");
  const said = found?.error?.message ?? `${response.status} ${response.statusText}`;
  return new Error(wait === null || said.includes("try again") ? said : `${said}; try again in ${wait} s`);
}

async function ask() {
  if (about === null) return load();
  const question = ++shown, input = asked(), began = performance.now();
  element("ask").disabled = true;
  element("answer").replaceChildren();
  say("Asking …");
  try {
    const response = await fetch("predict", {method: "POST", headers: headers(), body: JSON.stringify(body([input]))});
    const arrived = performance.now();
    if (!response.ok) throw await refusal(response);
    const [first] = await response.json();
    if (question !== shown) return;
    const explained = first.explanation !== undefined;
    const answer = explained ? first.answer : first;
    const parts = (RENDERERS[about.output] ?? renderOther)(answer, input);
    if (explained) parts.push(...renderWhy(first.explanation, input));
    if (response.headers.get("x-truncated-inputs")) {
      parts.push(make("p", {className: "note"}, "The text is longer than the model reads; its end was left out."));
    }
    parts.push(make("details", {}, make("summary", {}, "The answer as JSON"), make("pre", {tabIndex: 0}, JSON.stringify(first, null, 1))));
    element("answer").replaceChildren(...parts);
    const heard = [...element("answer").querySelectorAll(".headline")].map((part) => part.textContent);
    element("heard").textContent = heard.join("; ");
    show(element("status"));
    say(`Answered in ${Math.round(arrived - began)} ms by version ${response.headers.get("x-model-version")}`);
    if (response.headers.get("x-model-version") !== about.revisions.model) await load();
  } catch (error) {
    if (question === shown) say(error instanceof TypeError ? "The endpoint does not answer." : error.message, true);
  } finally {
    if (question === shown) element("ask").disabled = false;
  }
}

// ---------------------------------------------------------------------------------------------------- the same call

const shell = (text) => "'" + text.replaceAll("'", "'\\''") + "'";

function python(value) {
  if (Array.isArray(value)) return "[" + value.map(python).join(", ") + "]";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (value === null) return "None";
  if (typeof value !== "object") return JSON.stringify(value);
  return "{" + Object.entries(value).map(([name, entry]) => `${JSON.stringify(name)}: ${python(entry)}`).join(", ") + "}";
}

// What huggingface_hub has a method for; the rest is asked by the standard library.
const METHODS = {
  classes: ["text_classification", ["text"]],
  labels: ["text_classification", ["text"]],
  spans: ["question_answering", ["question", "context"]],
  tags: ["token_classification", ["text"]],
  tokens: ["fill_mask", ["text"]],
  summary: ["summarization", ["text"]],
};

function curlCall(address, question, keyed) {
  const key = keyed ? ` -H "authorization: Bearer $RTRAIN_KEY"` : "";
  return `curl -s ${shell(address)}${key} -H 'content-type: application/json' -d ${shell(JSON.stringify(question))}`;
}

function pythonCall(address, question, keyed) {
  const [method, fields] = METHODS[about.output] ?? ["", []];
  if (method && !question.parameters && String(fields) === String(about.fields)) {
    const given = typeof question.inputs === "string" ? {text: question.inputs} : question.inputs;
    const named = fields.map((field) => `${field}=${python(given[field])}`).join(", ");
    const key = keyed ? `, token=os.environ["RTRAIN_KEY"]` : "";
    return `${keyed ? "import os\n\n" : ""}from huggingface_hub import InferenceClient\n\n`
      + `client = InferenceClient(model=${python(address)}${key})\nprint(client.${method}(${named}))`;
  }
  const key = keyed ? `, "authorization": "Bearer " + os.environ["RTRAIN_KEY"]` : "";
  return `import json\n${keyed ? "import os\n" : ""}import urllib.request\n\nquestion = ${python(question)}\n`
    + `headers = {"content-type": "application/json"${key}}\n`
    + `request = urllib.request.Request(${python(address)}, json.dumps(question).encode(), headers)\n`
    + "print(json.load(urllib.request.urlopen(request)))";
}

function showCall() {
  if (about === null) return;
  const write = document.querySelector("[name=language]:checked").value === "curl" ? curlCall : pythonCall;
  element("call").textContent = write(new URL("predict", location.href).href, body(asked()), element("key").value.trim() !== "");
}

async function copy() {
  const range = document.createRange();
  range.selectNodeContents(element("call"));
  getSelection().removeAllRanges();
  getSelection().addRange(range);
  // Where the page has no right to the clipboard, it is selected all the same.
  const done = await navigator.clipboard?.writeText(element("call").textContent).then(() => true, () => false);
  say(done ? "Copied." : "Selected; press Ctrl and C.");
}

// -------------------------------------------------------------------------------------------------------- the start

const WORDS = {
  classes: "gives a text one of # labels", labels: "gives a text those of # labels that apply", heads: "gives a text several labels",
  number: "gives a text a number", tags: "marks what is named in a text", spans: "finds the answer in a context",
  summary: "sums up a document in its own sentences", tokens: "guesses masked words",
};
const NAMES = {text: "Text", text_pair: "Second text", question: "Question", context: "Context"};

function field(name) {
  const box = make("textarea", {id: `text-${name}`, required: true, dir: "auto", className: name === "question" ? "short" : ""});
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) element("form").requestSubmit();
  });
  const column = about.columns[name];
  const label = column && column !== name ? `${NAMES[name] ?? name} (column ${column})` : NAMES[name] ?? name;
  return [make("label", {htmlFor: box.id}, label), box];
}

function example(given) {
  const texts = typeof given === "string" ? [given] : about.fields.map((name) => given[name]);
  const button = make("button", {type: "button"}, make("span", {dir: "auto"}, texts.join(" · ")));
  button.addEventListener("click", () => {
    about.fields.forEach((name, place) => { element(`text-${name}`).value = texts[place] ?? ""; });
    showCall();
    ask();
  });
  return button;
}

async function load() {
  try {
    const response = await fetch("info", {headers: headers()});
    if (!response.ok) throw await refusal(response);
    const had = about;
    about = await response.json();
    document.title = about.name;
    element("name").textContent = about.name;
    const words = (WORDS[about.output] ?? "answers").replace("#", String(about.labels.length));
    element("about").textContent = `The model ${words} · version ${about.revisions.model} · ${about.engine}`;
    if (had === null) {
      element("fields").replaceChildren(...about.fields.flatMap(field));
      element(`text-${about.fields[0]}`).focus();
    }
    element("examples").replaceChildren(...about.examples.map(example));
    element("why-field").hidden = !about.explains;
    element("words-field").hidden = about.max_words === null;
    element("words").placeholder = about.max_words ?? "";
    for (const label of about.labels) if (about.output === "tags" && label !== "O") colour(label.replace(/^[BI]-/, ""));
    if (had === null) say("");
    showCall();
  } catch (error) {
    say(error instanceof TypeError ? "The endpoint does not answer." : error.message, true);
  }
}

element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
// One of several models, whose list lies above.
element("others").hidden = !/\/models\/[^/]+\/$/.test(location.pathname);
document.addEventListener("input", showCall);
element("copy").addEventListener("click", copy);
load();
