"use strict";
// The page of predictions: a gallery, one item enlarged, decisions, and the table for fit.
// Names of files and classes are only ever text nodes or attributes, never markup.

const page = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

function make(tag, attributes, ...children) {
  const element = document.createElementNS(["svg", "polyline"].includes(tag) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml", tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

// Items and their classes

const several = page.separator !== null; // whether a sample may have several classes, or none
const recordings = page.files.some((file) => file.seconds);
const items = page.items.map(([file, start, end, answer, scores, uncertainty]) => {
  const whole = page.files[file];
  const key = whole.row + (start === null ? "" : `#${start}-${end}`);
  return { file: whole, number: file, start, end, answer, scores, uncertainty, key, score: scores[0][1] };
});
const counts = new Map();
for (const item of items) for (const label of item.answer.length ? item.answer : [-1]) counts.set(label, (counts.get(label) || 0) + 1);
const common = [...counts.keys()].filter((label) => label >= 0).sort((a, b) => counts.get(b) - counts.get(a));
const PALETTE = ["#0b7fc1", "#e0702a", "#14976b", "#c660a0", "#d9a21b", "#7a63d1", "#4bb0c9", "#a2693b", "#cf4f57", "#7d9a2f"];
const place = new Map(common.map((label, number) => [label, number]));
const colourOf = (label) => PALETTE[place.get(label)] || "#8a94a0";
const nameOf = (label) => (label < 0 ? "none" : page.classes[label]);
const namesOf = (labels) => (labels.length ? labels.map(nameOf).join(", ") : "none");
const dot = (label) => make("span", { class: "dot", style: `--of-class:${colourOf(label)}` });
const clock = (seconds) => {
  const minutes = Math.floor(seconds / 60);
  return minutes ? `${minutes}:${String(Math.floor(seconds % 60)).padStart(2, "0")}` : `${Number(seconds.toFixed(2))} s`;
};

// Decisions: {key: {label: [names] | null, at}}; a label of null is wrong without another class, and none is undone

const store = `longseq page ${page.id}`;
const decisions = { ...page.decisions };
let served = false; // by longseq review
function take(others) {
  for (const [key, other] of Object.entries(others)) if (!decisions[key] || decisions[key].at < other.at) decisions[key] = other;
}
try { take(JSON.parse(localStorage.getItem(store) || "{}")); } catch { /* the browser keeps nothing for files */ }

const decided = (item) => decisions[item.key]?.label !== undefined;
function truth(item) {
  if (decided(item)) return decisions[item.key].label?.map((name) => page.classes.indexOf(name)) ?? null;
  return item.start === null ? item.file.known : null;
}
const same = (some, others) => some.length === others.length && some.every((label) => others.includes(label));
function verdict(item) {
  const known = truth(item);
  if (known) return same(item.answer, known) ? "correct" : "wrong";
  return decided(item) ? "wrong" : "";
}

let waiting = 0;
function decide(item, label) {
  decisions[item.key] = { ...(label === undefined ? {} : { label: label && label.map(nameOf) }), at: Date.now() };
  clearTimeout(waiting);
  waiting = setTimeout(save, 200);
  refresh(item);
}
async function save() {
  try { localStorage.setItem(store, JSON.stringify(decisions)); } catch { /* as above */ }
  if (!served) return;
  const body = JSON.stringify({ decisions, table: table() });
  const answer = await fetch("decisions", { method: "PUT", headers: { "Content-Type": "application/json" }, body }).catch(() => null);
  $("saved").textContent = answer?.ok ? "saved in the folder" : "not saved: longseq review has ended; decisions stay in this browser";
}

// The table that fit reads: the samples of the run, and what was decided

function table() {
  const { columns, rows } = page.table;
  const timed = items.some((item) => item.start !== null);
  const header = columns.length ? [...columns] : ["path", "label"];
  if (timed && !header.includes("start")) header.splice(1, 0, "start", "end");
  const all = new Map(rows.map((row) => {
    const of = Object.fromEntries(columns.map((name, number) => [name, row[number]]));
    return [of.path + (of.end ? `#${Number(of.start)}-${Number(of.end)}` : ""), of];
  }));
  for (const item of items) {
    const label = decided(item) ? decisions[item.key].label : undefined;
    if (label === null) all.delete(item.key); // wrong, without another class
    if (!label) continue;
    const row = all.get(item.key) || { ...item.file.cells, path: item.file.row, start: item.start, end: item.end };
    all.set(item.key, { ...row, label: label.join(page.separator ?? "") });
  }
  const cell = (value) => (/[",\r\n;]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
  const lines = [...all.values()].map((row) => header.map((name) => cell(String(row[name] ?? ""))).join(","));
  return [header.join(","), ...lines, ""].join("\n");
}

// The gallery: cards are made while scrolling

const gallery = $("gallery");
const filter = { label: null, show: "all", order: "uncertainty", hour: null };
let shown = [], drawn = 0, current = -1;
const SHOW = {
  all: ["all", () => true], open: ["not decided", (item) => !decided(item)], decided: ["decided", decided],
  correct: ["correct", (item) => verdict(item) === "correct"], wrong: ["wrong", (item) => verdict(item) === "wrong"],
  unknown: ["without a label", (item) => verdict(item) === ""],
};
const first = (item) => item.answer[0] ?? -1;
const rank = (item) => place.get(first(item)) ?? items.length;
const ORDER = {
  uncertainty: ["most uncertain first", (a, b) => b.uncertainty - a.uncertainty],
  class: ["by class, most uncertain first", (a, b) => rank(a) - rank(b) || b.uncertainty - a.uncertainty],
  score: ["highest score first", (a, b) => b.score - a.score],
  path: ["by name and time", (a, b) => a.number - b.number || a.start - b.start],
};

function renew() {
  const least = Number($("least").value), most = Number($("most").value) || 1;
  shown = items.filter((item) =>
    (filter.label === null || (filter.label < 0 ? !item.answer.length : item.answer.includes(filter.label))) &&
    item.score >= least && item.score <= most && (filter.hour === null || hourOf(item) === filter.hour) && SHOW[filter.show][1](item));
  shown.sort(ORDER[filter.order][1]);
  gallery.replaceChildren();
  drawn = 0;
  current = -1;
  draw();
  if (!shown.length) gallery.append(make("p", { class: "empty" }, "No item has all of these properties."));
  $("count").textContent = shown.length === items.length ? `${items.length} items` : `${shown.length} of ${items.length} items`;
  for (const chip of $("classes").children) chip.setAttribute("aria-pressed", String(filter.label) === chip.value);
  window.scrollTo({ top: 0 });
}
function draw(until = drawn + 90) {
  for (; drawn < Math.min(until, shown.length); drawn++) {
    const item = shown[drawn], number = drawn;
    if (filter.order === "class" && (!drawn || rank(shown[drawn - 1]) !== rank(item))) gallery.append(make("h2", {}, nameOf(first(item))));
    item.card = make("button", { class: "card", type: "button", click: () => open(number), focus: () => select(number, false) });
    fill(item);
    gallery.append(item.card);
  }
}
function fill(item) {
  const found = verdict(item), known = truth(item);
  const words = { correct: "✓", wrong: known ? `✗ ${namesOf(known)}` : "✗" }[found] || "";
  item.card.replaceChildren(
    make("span", { class: "picture" }, picture(item), make("span", { class: `badge ${found === "wrong" ? "bad" : "good"} ${decided(item) ? "decided" : ""}` }, words)),
    make("span", { class: "text" },
      make("span", { class: "answer" }, dot(first(item)), make("span", {}, namesOf(item.answer)), make("small", {}, `${item.answer.length ? "" : `${nameOf(item.scores[0][0])} `}${item.score.toFixed(2)}`)),
      make("span", { class: "path", title: item.file.path }, titleOf(item))));
}
function titleOf(item) {
  const name = item.file.path.split("/").pop();
  return item.start === null ? name : `${clock(item.start)}–${clock(item.end)} · ${name}`;
}
function picture(item) {
  if (item.file.seconds) {
    const start = item.start ?? 0, end = item.end ?? item.file.seconds;
    return make("span", { class: "framed" }, strip(item.file, start, end), ...lanes(item.file, start, end));
  }
  const name = item.file.picture || item.file.explained;
  return name ? make("img", { src: `files/${name}`, loading: "lazy", alt: "", class: name.endsWith(".png") && item.file.picture && "small" }) : make("span", {});
}
const MINUTE = 60;
function strip(file, start, end) { // a spectrogram from start to end
  const span = Math.max(end - start, 1e-3), percent = (seconds) => `${(100 * seconds) / span}%`;
  const image = (name, from, until) => make("img", { src: `files/${name}`, loading: "lazy", alt: "", style: `left:${percent(from - start)};width:${percent(until - from)}` });
  const box = make("div", { class: "strip" });
  if (!file.picture) return box;
  if (!file.sections || span > 5 * MINUTE) box.append(image(file.picture, 0, file.seconds));
  else for (let at = Math.floor(start / MINUTE); at < Math.min(file.sections, Math.ceil(end / MINUTE)); at++) {
    box.append(image(file.picture.replace(".jpg", `-${at}.jpg`), at * MINUTE, Math.min((at + 1) * MINUTE, file.seconds)));
  }
  return box;
}
function lanes(file, start, end) { // the events, a lane for each class
  const events = (file.events || []).filter((event) => event[1] > start && event[0] < end), percent = (seconds) => `${(100 * seconds) / (end - start)}%`;
  return [...new Set(events.map((event) => event[2]))].map((label) =>
    make("span", { class: "lane", style: `--of-class:${colourOf(label)}` }, ...events.filter((event) => event[2] === label).map(([from, to, , score]) =>
      make("i", { style: `left:${percent(from - start)};width:${percent(to - from)}`, title: `${nameOf(label)} ${clock(from)}–${clock(to)}, ${score}` }))));
}
function select(number, scroll = true) {
  if (number < 0 || number >= shown.length) return;
  if (number >= drawn) draw(number + 30);
  shown[current]?.card?.classList.remove("current");
  current = number;
  shown[number].card.classList.add("current");
  if (scroll) shown[number].card.scrollIntoView({ block: "nearest" });
  if (!$("item").open) shown[number].card.focus({ preventScroll: true });
}
function refresh(item) {
  if (item.card) fill(item);
  if ($("item").open) enlarge();
  summarise();
}
new IntersectionObserver((seen) => seen.some((entry) => entry.isIntersecting) && draw(), { rootMargin: "1200px" }).observe($("end"));
window.addEventListener("scroll", () => $("end").getBoundingClientRect().top < window.innerHeight + 1200 && draw(), { passive: true });

// One item, enlarged

const audio = $("audio");
let frames = []; // [element of a line, start, end] of the spectrograms in view
let sounding = null; // the file whose sound is loaded
let until = Infinity;
let enlarged = -1; // the number of the item in the dialog, if it is open
function open(number) {
  select(number);
  enlarge();
  if (!$("item").open) $("item").showModal();
}
function enlarge() {
  enlarged = current;
  const item = shown[current], { file } = item, known = truth(item);
  const view = make("div", { class: "view" });
  frames = [];
  if (file.seconds) {
    if (item.start !== null && item.end - item.start < file.seconds - 0.01) view.append(sound(item, `${clock(item.start)} to ${clock(item.end)}`, item.start, item.end));
    view.append(sound(item, "The whole recording", 0, file.seconds));
  } else if (file.picture) view.append(make("div", { class: "picture" }, picture(item)));
  const explained = file.explained ? make("div", { class: "explained" }, make("img", { src: `files/${file.explained}`, alt: "What decided: explain's picture" })) : null;
  const facts = [`uncertainty ${item.uncertainty.toFixed(2)}`];
  if (known) facts.unshift(`${decided(item) ? "decided" : "label"}: ${namesOf(known)}`);
  if (file.split) facts.push(`in the run's split ${file.split}`);
  $("item").replaceChildren(
    make("div", { class: "head" }, make("h3", {}, file.path), make("button", { type: "button", "aria-label": "Close", click: close }, "✕")),
    make("div", { class: "inside" }, view,
      make("div", { class: "side" }, choices(item),
        make("p", { class: "facts" }, facts.join(" · ")),
        make("div", { class: "acts" },
          act("Correct", "c", () => correct(item), decided(item) && verdict(item) === "correct"),
          act("Wrong", "w", () => wrong(item), decided(item) && decisions[item.key].label === null),
          act("Previous", "←", () => step(-1), false), act("Next", "→", () => step(1), false),
          act("Undo", "u", () => decide(item, undefined), false),
          file.sound ? act("Play", "space", play, false) : null)), explained));
}
function act(text, key, click, pressed) {
  return make("button", { type: "button", click, "aria-pressed": String(Boolean(pressed)) }, text, make("kbd", {}, key));
}
// The keys of classes: their names if these are digits, else 1 to 9 in their order; of many classes, for an item's most probable ones
const digits = !several && page.classes.every((name) => /^\d$/.test(name));
function offered(item) { // [key, class]
  const labels = digits || page.classes.length <= 9 ? page.classes.map((_, label) => label) : item.scores.map(([label]) => label);
  return labels.slice(0, digits ? 10 : 9).map((label, number) => [digits ? page.classes[label] : String(number + 1), label]);
}
function choices(item) {
  const scores = new Map(item.scores), chosen = decided(item) ? truth(item) ?? [] : item.answer;
  const box = make("div", { class: "choices" });
  for (const [key, label] of offered(item)) {
    const score = scores.get(label) ?? 0;
    box.append(make("button", { type: "button", style: `--of-class:${colourOf(label)}`, "aria-pressed": String(chosen.includes(label)), click: () => choose(item, label) },
      make("kbd", {}, key), make("span", {}, nameOf(label)), make("small", {}, scores.has(label) ? score.toFixed(2) : ""),
      make("span", { class: "bar" }, make("i", { style: `width:${100 * score}%` }))));
  }
  if (several) {
    const none = decided(item) && truth(item)?.length === 0;
    box.append(make("button", { type: "button", "aria-pressed": String(none), click: () => decide(item, []) }, make("kbd", {}, "0"), make("span", {}, "none of them")));
  }
  if (offered(item).length < page.classes.length) {
    const list = make("datalist", { id: "names" }, ...page.classes.map((name) => make("option", { value: name })));
    const change = (event) => page.classes.includes(event.target.value) && choose(item, page.classes.indexOf(event.target.value));
    box.append(make("input", { id: "other", list: "names", placeholder: "Another class (o)", change, "aria-label": "Another class" }), list);
  }
  return box;
}
function choose(item, label) {
  if (!several) return next(item, [label]);
  const chosen = decided(item) ? truth(item) ?? [] : item.answer;
  decide(item, chosen.includes(label) ? chosen.filter((other) => other !== label) : [...chosen, label]);
}
const correct = (item) => next(item, several && decided(item) && truth(item) ? truth(item) : item.answer);
const wrong = (item) => next(item, null);
function next(item, label) { // decide, and go on with the next item
  decide(item, label);
  step(1);
}
function step(by) {
  select(current + by);
  if ($("item").open) enlarge();
}

// Sound: a spectrogram, curves and events; a click plays that moment

function sound(item, title, start, end) {
  const { file } = item, span = Math.max(end - start, 1e-3), percent = (seconds) => `${(100 * (seconds - start)) / span}%`;
  const line = make("div", { class: "head-line", hidden: "" });
  const frame = make("div", { class: "frame", title: file.sound ? "Click to play" : "", click: (event) => {
    const box = frame.getBoundingClientRect();
    playFrom(file, start + ((event.clientX - box.left) / box.width) * span);
  } }, strip(file, start, end));
  const curves = Object.entries(file.curves || {}).map(([label, text]) => [Number(label), text]);
  if (curves.length) frame.append(make("svg", { viewBox: "0 0 1 1", preserveAspectRatio: "none" }, ...curves.map(([label, text]) => {
    const points = [...text].map((level, number) => `${((((number + 0.5) / text.length) * file.seconds - start) / span).toFixed(5)},${(0.98 - (0.96 * parseInt(level, 36)) / 35).toFixed(3)}`);
    return make("polyline", { points: points.join(" "), style: `--of-class:${colourOf(label)}` });
  })));
  const heard = (file.events || []).filter((event) => event[1] > start && event[0] < end).map((event) => event[2]);
  const named = [...new Set([...curves.map(([label]) => label), ...heard])];
  frame.append(...lanes(file, start, end));
  if (item.start !== null && span > item.end - item.start) frame.append(make("div", { class: "part", style: `left:${percent(item.start)};width:${(100 * (item.end - item.start)) / span}%` }));
  frame.append(line);
  frames.push([line, start, end]);
  return make("div", { class: "sound" }, make("h4", {}, title), frame,
    make("div", { class: "axis" }, make("span", {}, clock(start)), make("span", {}, clock((start + end) / 2)), make("span", {}, clock(end))),
    make("div", { class: "legend" }, ...named.map((label) => make("span", {}, dot(label), nameOf(label)))));
}
function playFrom(file, start, end = Infinity) {
  if (!file.sound) return;
  until = end;
  if (sounding === file) audio.currentTime = start;
  else {
    sounding = file;
    audio.src = `${served && file.sound.startsWith("..") ? `sound/${page.files.indexOf(file)}` : file.sound}#t=${start}`;
  }
  audio.play().catch(() => { $("saved").textContent = "This browser cannot play the sound."; });
}
function play() {
  const item = shown[current];
  if (!audio.paused) return audio.pause();
  playFrom(item.file, item.start ?? 0, item.end ?? Infinity);
}
audio.addEventListener("timeupdate", () => {
  if (audio.currentTime >= until) audio.pause();
  for (const [line, start, end] of frames) {
    line.hidden = audio.currentTime < start || audio.currentTime > end;
    line.style.left = `${(100 * (audio.currentTime - start)) / (end - start)}%`;
  }
});
// The browser puts the focus back to where it was at the opening, and tells of it later, when the next key may have come
function close() {
  const last = enlarged;
  enlarged = -1;
  $("item").close();
  select(last);
}
$("item").addEventListener("close", () => {
  audio.pause();
  if (enlarged >= 0) select(enlarged); // closed by the browser itself
});

// Days and hours, if the names of the recordings say when they began

const HOUR = 3600;
const hourOf = (item) => (item.file.began === null || !item.file.seconds ? null : Math.floor((item.file.began + (item.start ?? 0)) / HOUR));
function calendar() {
  const heard = new Map(); // hour: {label: seconds}
  const add = (began, from, to, label) => { // seconds of each hour
    for (let at = began + from; at < began + to;) {
      const hour = Math.floor(at / HOUR), stop = Math.min((hour + 1) * HOUR, began + to), of = heard.get(hour) || heard.set(hour, new Map()).get(hour);
      if (label !== null) of.set(label, (of.get(label) || 0) + stop - at);
      at = stop;
    }
  };
  for (const file of page.files) if (typeof file.began === "number") {
    add(file.began, 0, file.seconds, null);
    for (const [from, to, label] of file.events || []) add(file.began, from, to, label);
  }
  for (const item of items) if (typeof item.file.began === "number" && !item.file.events?.length) {
    for (const label of item.answer) if (!item.file.events) add(item.file.began, item.start ?? 0, item.end ?? item.file.seconds, label);
  }
  if (!heard.size) return;
  const most = Math.max(...[...heard.values()].map((of) => [...of.values()].reduce((a, b) => a + b, 0)), 1);
  const days = [...new Set([...heard.keys()].map((hour) => Math.floor(hour / 24)))].sort((a, b) => a - b);
  const box = $("days");
  box.append(make("span", {}), ...Array.from({ length: 24 }, (_, hour) => make("span", { class: "hour" }, hour % 3 ? "" : String(hour).padStart(2, "0"))));
  for (let day = days[0]; day <= days[days.length - 1]; day++) {
    const name = new Date(day * 864e5).toISOString().slice(0, 10);
    box.append(make("span", { title: name }, make("i", {}, name.slice(0, 5)), name.slice(5)));
    for (let hour = day * 24; hour < day * 24 + 24; hour++) {
      const of = [...(heard.get(hour) || [])].sort((a, b) => (place.get(a[0]) ?? 99) - (place.get(b[0]) ?? 99));
      let height = 0;
      const stops = of.map(([label, seconds]) => `${colourOf(label)} ${height}% ${(height += (100 * seconds) / most)}%`);
      const words = of.map(([label, seconds]) => `${nameOf(label)} ${clock(seconds)}`).join(", ") || (heard.has(hour) ? "nothing" : "no recording");
      const click = () => { filter.hour = filter.hour === hour ? null : hour; for (const cell of box.querySelectorAll("button")) cell.setAttribute("aria-pressed", filter.hour !== null && cell.value === String(filter.hour)); renew(); };
      box.append(make("button", { type: "button", value: hour, click, disabled: heard.has(hour) ? null : "", title: `${name} ${hour % 24}:00: ${words}`, "aria-label": `${name} ${hour % 24}:00: ${words}`, "aria-pressed": "false",
        style: stops.length ? `background-image:linear-gradient(to top,${stops.join(",")},transparent ${height}%)` : null }));
    }
  }
  $("calendar").hidden = false;
}

// Header, filters, keys

function summarise() {
  const known = items.filter((item) => verdict(item)), right = known.filter((item) => verdict(item) === "correct").length;
  const made = items.filter(decided).length, tell = (name, ...value) => make("div", {}, make("dt", {}, name), make("dd", {}, ...value));
  const figures = $("figures");
  figures.replaceChildren();
  if (known.length) figures.append(tell("correct, where known", `${right} of ${known.length} `, make("small", {}, `${((100 * right) / known.length).toFixed(1)} %`)));
  const [before, now] = page.figures.length > 1 ? page.figures.slice(-2) : [null, page.figures[0]];
  if (now) {
    const comparable = before && before.name === now.name && before.split && before.split === now.split;
    const change = comparable ? now.value - before.value : 0, after = now.decisions ? ` after ${now.decisions} decisions` : "";
    const better = page.lower ? change < 0 : change > 0;
    figures.append(tell(`validation ${now.name.replaceAll("_", " ")}`, comparable ? `${before.value.toFixed(3)} → ${now.value.toFixed(3)} ` : `${now.value.toFixed(3)} `,
      comparable ? make("small", { class: change ? (better ? "good" : "bad") : "" }, `${change < 0 ? "−" : "+"}${Math.abs(change).toFixed(3)}${after}`)
        : make("small", {}, before ? `before ${before.value.toFixed(3)}, on another split` : "")));
  }
  $("decided").textContent = `${made} of ${items.length} decided`;
  if (!made) $("saved").textContent = "";
  else if (!served) $("saved").textContent = "kept in this browser";
}
function explainKeys() {
  const keys = [["← →", "the item before, the next"], ["↑ ↓", "a row up or down in the gallery"], ["enter", "enlarge, or close"], ["c", "the prediction is correct"],
    ["w", "it is wrong, and no class fits"], [several ? "1–9, 0" : digits ? "0–9" : "1–9", several ? "add or remove a class; none of them" : "it is this class"], ["u", "undo"]];
  if (!digits && page.classes.length > 9) keys.push(["o", "another class, by name"]);
  if (recordings) keys.push(["space", "play or pause"]);
  const retrain = page.retrain || `--data.root ${page.table.root} --data.table labels.csv`;
  $("more").replaceChildren(make("h3", {}, "Keys"), make("div", { class: "keys" }, ...keys.flatMap(([key, text]) => [make("kbd", {}, key), make("span", {}, text)])),
    make("h3", {}, "Train from your decisions"),
    make("p", {}, page.table.columns.length ? "The table holds the samples of the run in their splits. What you decided has its new label; what is new is in the training split." : "The table holds what you decided."),
    make("p", {}, served ? "It is saved in this folder with every decision." : "Export table saves it as labels.csv; longseq review saves it in this folder with every decision."),
    make("pre", {}, retrain), make("p", {}, make("button", { type: "button", click: () => $("more").close() }, "Close")));
  $("more").showModal();
}
function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("more").open) return;
  const field = event.target.closest("input, select"), item = shown[Math.max(current, 0)], isOpen = $("item").open;
  if (field || !item) return;
  const columns = getComputedStyle(gallery).gridTemplateColumns.split(" ").length;
  const acts = {
    ArrowRight: () => step(1), ArrowLeft: () => step(-1),
    ArrowDown: () => !isOpen && select(Math.min(current + columns, shown.length - 1)), ArrowUp: () => !isOpen && select(current - columns),
    c: () => correct(item), w: () => wrong(item), u: () => decide(item, undefined), o: () => { if (!isOpen) open(Math.max(current, 0)); $("other")?.focus(); },
    Enter: () => (isOpen ? close() : open(Math.max(current, 0))), Escape: () => isOpen && close(), "?": explainKeys, " ": play,
    0: () => several && decide(item, []),
  };
  const label = offered(item).find(([key]) => key === event.key)?.[1];
  const inside = event.target.closest("button") && !event.target.closest(".card");
  if (inside && [" ", "Enter"].includes(event.key)) return; // the button's own
  const deed = label === undefined ? acts[event.key] : () => choose(item, label);
  if (!deed) return;
  event.preventDefault();
  if (current < 0) select(0, false);
  deed();
}

async function begin() {
  $("title").textContent = page.title;
  $("about").textContent = `${items.length} predictions of ${page.model}, ${page.made}`;
  if (recordings || page.kind === "features") gallery.classList.add("wide");
  const chip = (label, name, count) => make("button", { type: "button", value: String(label), click: () => { filter.label = label; renew(); } }, label === null ? null : dot(label), make("span", {}, name), make("small", {}, String(count)));
  $("classes").append(chip(null, "all", items.length), ...common.map((label) => chip(label, nameOf(label), counts.get(label))));
  if (counts.has(-1)) $("classes").append(chip(-1, "none", counts.get(-1)));
  for (const [id, options] of [["show", SHOW], ["order", ORDER]]) {
    $(id).append(...Object.entries(options).map(([value, [text]]) => make("option", { value }, text)));
    $(id).addEventListener("change", () => { filter[id] = $(id).value; renew(); });
  }
  for (const id of ["least", "most"]) $(id).addEventListener("change", renew);
  $("help").addEventListener("click", explainKeys);
  $("export").addEventListener("click", () => {
    const link = make("a", { href: URL.createObjectURL(new Blob([table()], { type: "text/csv" })), download: "labels.csv" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
  document.addEventListener("keydown", pressed);
  if (location.protocol.startsWith("http")) {
    const answer = await fetch("decisions").catch(() => null);
    served = Boolean(answer?.ok && answer.headers.get("Content-Type") === "application/json");
    if (served) take(await answer.json());
    if (served && items.some(decided)) save();
  }
  calendar();
  renew();
  summarise();
}
begin();
