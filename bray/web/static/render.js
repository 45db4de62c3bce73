"use strict";
// The page of `bray render`. What is shown is (trial, episode, renderer, tick); it is in the address, so that a reload keeps it.

const SPEEDS = [0.5, 1, 2, 5, 10, 15, 20, 30, 60];
const AHEAD = 8; // frames that are asked for before they are due
const KEPT = 400; // frames that are remembered
const POLL_MS = 2000;

const $ = (id) => document.getElementById(id);
const at = { trial: "", episode: "", renderer: "", tick: 0, ticks: 0 };
let playing = false;
let renderers = [];
let episodes = [];
let seen = null; // names of episodes, to tell which are new
let frames = new Map(); // tick -> promise of a frame of what is chosen now
let picked = 0; // counts choices of an episode, and
let choice = 0; // of what frames are made of: what comes for an older choice is dropped

// --- asking ----------------------------------------------------------------------------------------------------------

async function ask(path, query, body) {
  const url = path + (query ? "?" + new URLSearchParams(query) : "");
  const options = body && { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  let answer;
  try {
    answer = await fetch(url, options);
  } catch {
    throw new Error("`bray render` does not answer; was it ended?");
  }
  const data = await answer.json();
  if (!answer.ok) throw new Error(data.error);
  return data;
}

function frame(tick) {
  if (!frames.has(tick)) {
    const mine = frames;
    const { trial, episode, renderer } = at;
    const asked = ask("/api/frame", { trial, episode, renderer, tick }).then((f) => {
      if (f.error) mine.delete(tick); // the user may mend it and come back
      return f;
    });
    asked.catch(() => mine.delete(tick));
    mine.set(tick, asked);
    if (mine.size > KEPT) {
      let far = tick;
      for (const t of mine.keys()) if (Math.abs(t - at.tick) > Math.abs(far - at.tick)) far = t;
      mine.delete(far);
    }
  }
  return frames.get(tick);
}

// --- choosing --------------------------------------------------------------------------------------------------------

async function start() {
  for (const s of SPEEDS) $("speed").add(new Option(`${s} / s`, s));
  $("speed").value = 10;
  const begin = await ask("/api/start");
  renderers = begin.renderers;
  $("project").textContent = begin.project;
  for (const name of renderers) $("renderer").add(new Option(name, name));
  $("renderer").add(new Option("State only", ""));
  const wanted = new URLSearchParams(location.hash.slice(1));
  at.renderer = wanted.has("renderer") && [...renderers, ""].includes(wanted.get("renderer")) ? wanted.get("renderer") : (renderers[0] ?? "");
  $("renderer").value = at.renderer;
  document.body.classList.toggle("state-only", !at.renderer);
  showTrials(begin.trials);
  const trial = [wanted.get("trial"), begin.trial, begin.trials[0]].find((t) => t && begin.trials.includes(t));
  if (!trial) return hint("No trial has episodes yet", `They appear here as soon as a training saves them under ${begin.project}/TRIAL/episodes.`);
  await chooseTrial(trial, wanted.get("episode"), Number(wanted.get("tick")) || 0);
}

function showTrials(names) {
  const select = $("trial");
  if ([...select.options].map((o) => o.value).join("\n") !== names.join("\n")) {
    select.replaceChildren(...names.map((n) => new Option(n, n)));
  }
  select.value = at.trial;
  select.disabled = !names.length;
}

async function chooseTrial(trial, episode, tick) {
  setPlaying(false);
  Object.assign(at, { trial, episode: "", tick: 0, ticks: 0 });
  picked++;
  choice++;
  seen = null;
  $("trial").value = trial;
  $("fields").replaceChildren();
  problem();
  await list();
  if (episode) return chooseEpisode(episode, tick);
  if (episodes.length) return chooseNewest();
  hint("No episodes yet", "They appear here as soon as a training saves them. An actor saves them with episode_save_interval, and the launch file says dump_state: true.");
}

/** The newest episode that can be read. */
async function chooseNewest() {
  for (let tries = 0; tries < 10; tries++) {
    const intact = episodes.find((e) => !e.error);
    if (!intact || (await chooseEpisode(intact.name))) return;
  }
}

/** Whether it can be shown. */
async function chooseEpisode(name, tick = 0) {
  setPlaying(false);
  Object.assign(at, { episode: name, tick: 0, ticks: 0 });
  const mine = ++picked;
  choice++;
  frames = new Map();
  markChosen();
  try {
    const { ticks } = await ask("/api/episode", { trial: at.trial, episode: name });
    if (mine !== picked) return true;
    at.ticks = ticks;
    problem();
  } catch (e) {
    if (mine !== picked) return true;
    $("fields").replaceChildren();
    hint("This episode cannot be shown", name);
    problem("The episode cannot be read", e.message);
    showTick();
    await list();
    return false;
  }
  $("slider").max = at.ticks - 1;
  go(tick);
  return true;
}

function chooseRenderer(name) {
  at.renderer = name;
  document.body.classList.toggle("state-only", !name);
  choice++;
  frames = new Map();
  problem();
  if (at.ticks) go(at.tick);
}

// --- episodes --------------------------------------------------------------------------------------------------------

let listed = ""; // what the list shows

async function list() {
  const { trial } = at;
  const found = await ask("/api/episodes", { trial, find: $("find").value });
  if (trial !== at.trial) return;
  const answer = JSON.stringify([trial, found]);
  if (answer === listed) return;
  listed = answer;
  const fresh = seen ? new Set(found.episodes.map((e) => e.name).filter((n) => !seen.has(n))) : new Set();
  if (!$("find").value) {
    seen = seen || new Set();
    for (const e of found.episodes) if (!fresh.has(e.name)) seen.add(e.name);
  }
  episodes = found.episodes;
  showTrials(found.trials);
  $("count").textContent = episodes.length < found.total ? `${episodes.length} of ${found.total}` : found.total || "";
  const rows = episodes.map((e) => {
    const button = make("button", e.error ? "bad" : fresh.has(e.name) ? "new" : "");
    button.dataset.name = e.name;
    button.title = e.error || e.name;
    const top = make("span", "top");
    top.append(make("span", "title", e.title), make("span", "when", when(e.modified)));
    button.append(top, make("span", "detail", detail(e)));
    const row = document.createElement("li");
    row.append(button);
    return row;
  });
  if (!rows.length) rows.push(make("li", "none", $("find").value ? "None has such a name." : "None yet."));
  const focused = document.activeElement?.dataset?.name;
  $("episodes").replaceChildren(...rows);
  if (focused) [...$("episodes").querySelectorAll("button")].find((b) => b.dataset.name === focused)?.focus({ preventScroll: true });
  markChosen();
}

function detail(e) {
  const size = e.error ? "damaged" : e.ticks === null ? bytes(e.bytes) : `${e.ticks} ticks`;
  return [e.detail, size].filter(Boolean).join(" · ");
}

function when(seconds) {
  const time = new Date(seconds * 1000);
  const today = time.toDateString() === new Date().toDateString();
  return today ? time.toLocaleTimeString([], { hour12: false }) : time.toLocaleDateString();
}

function bytes(n) {
  const units = ["B", "KB", "MB", "GB"];
  let i = 0;
  for (; n >= 1000 && i < 3; i++) n /= 1000;
  return `${n < 10 && i ? n.toFixed(1) : Math.round(n)} ${units[i]}`;
}

function markChosen() {
  for (const b of $("episodes").querySelectorAll("button")) b.setAttribute("aria-current", b.dataset.name === at.episode);
}

async function poll() {
  if (document.hidden) return;
  try {
    if (!at.trial) {
      const begin = await ask("/api/start");
      if (begin.trials.length) await chooseTrial(begin.trials[0]);
      return;
    }
    await list();
    if (document.body.classList.contains("lost")) {
      document.body.classList.remove("lost");
      problem();
      if (at.ticks) go(at.tick);
    }
    if (!at.episode) await chooseNewest();
  } catch (e) {
    if (!document.body.classList.contains("lost")) problem("", e.message);
    document.body.classList.add("lost");
  }
}

// --- ticks -----------------------------------------------------------------------------------------------------------

let drawing = false;

/** Show a tick. Of many that are asked for while one is on its way, the last counts. */
async function go(tick) {
  at.tick = Math.max(0, Math.min(tick, at.ticks - 1));
  showTick();
  if (drawing) return;
  drawing = true;
  try {
    for (;;) {
      const [mine, wanted] = [choice, at.tick];
      if (!at.ticks) break; // another episode is being chosen; it comes back here
      const slow = setTimeout(() => document.body.classList.add("waiting"), 250);
      try {
        const f = await frame(wanted);
        if (mine === choice) draw(f);
      } catch (e) {
        if (mine === choice) problem("", e.message);
      }
      clearTimeout(slow);
      document.body.classList.remove("waiting");
      if (mine === choice && wanted === at.tick) break;
    }
  } finally {
    drawing = false;
  }
}

function showTick() {
  const none = !at.ticks;
  $("slider").value = at.tick;
  $("slider").disabled = none;
  $("tick").textContent = none ? "–" : `${at.tick} / ${at.ticks - 1}`;
  for (const id of ["first", "back", "play", "next", "last"]) $(id).disabled = none;
  $("export").disabled = none || !at.renderer;
  $("export").title = at.renderer ? "" : "Choose a renderer first";
  const { trial, episode, renderer, tick } = at;
  history.replaceState(null, "", "#" + new URLSearchParams({ trial, episode, renderer, tick }));
}

async function play() {
  if (!at.ticks) return;
  if (at.tick >= at.ticks - 1) at.tick = -1; // from the beginning
  setPlaying(true);
  const mine = choice;
  let due = performance.now();
  while (playing && mine === choice) {
    let tick = at.tick + 1;
    if (tick >= at.ticks) {
      if (!$("loop").checked) break;
      tick = 0;
    }
    for (let i = 0; i <= AHEAD && tick + i < at.ticks; i++) frame(tick + i).catch(() => {});
    let f = null;
    try {
      f = await frame(tick);
    } catch (e) {
      problem("", e.message);
      break;
    }
    due = Math.max(due + 1000 / Number($("speed").value), performance.now() - 50);
    await new Promise((done) => setTimeout(done, Math.max(0, due - performance.now())));
    if (!playing || mine !== choice) return;
    at.tick = tick;
    showTick();
    draw(f);
  }
  if (mine === choice) pause();
}

function pause() {
  if (!playing) return;
  setPlaying(false);
  if (at.ticks) go(at.tick); // the State may lag behind while it plays
}

function setPlaying(on) {
  playing = on;
  document.body.classList.toggle("is-playing", on);
  $("play").setAttribute("aria-label", on ? "Pause" : "Play");
}

function step(by) {
  if (!at.ticks) return;
  pause();
  go(at.tick + by);
}

function faster(by) {
  const i = $("speed").selectedIndex + by;
  if (i >= 0 && i < SPEEDS.length) $("speed").selectedIndex = i;
}

// --- drawing ---------------------------------------------------------------------------------------------------------

function make(tag, cls, text) {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  if (text !== undefined) node.textContent = text;
  return node;
}

function hint(title, text) {
  const box = make("div", "hint");
  box.append(make("b", "", title), make("span", "", text));
  $("stage").replaceChildren(box);
}

function problem(title, text) {
  $("problem").hidden = text === undefined;
  if (text === undefined) return;
  $("problem").firstElementChild.textContent = title;
  $("problem").lastElementChild.textContent = text;
}

let fieldsDrawn = 0;

function draw(f) {
  if (f.error) problem(`${at.renderer} failed at tick ${f.tick}`, f.error);
  else problem();
  drawPictures(f);
  if (!playing || performance.now() - fieldsDrawn > 90) {
    fieldsDrawn = performance.now();
    drawFields(f.fields);
  }
}

function drawPictures(f) {
  const stage = $("stage");
  if (f.error) return hint("No picture of this tick", "The renderer raised an error, which is shown below.");
  if (!at.renderer) {
    return renderers.length
      ? hint("State only", "Choose a renderer to see pictures.")
      : hint("No renderer", "The launch file has none. A component with kind: render and the module of a function render(episode, tick) makes pictures.");
  }
  const figures = stage.querySelectorAll("figure");
  const same = figures.length === f.pictures.length && f.pictures.every((p, i) => figures[i].dataset.name === p.name);
  if (!same) {
    stage.replaceChildren(
      ...f.pictures.map((p) => {
        const figure = make("figure");
        figure.dataset.name = p.name;
        const img = make("img");
        img.alt = `Picture ${p.name}`;
        img.addEventListener("load", () => {
          figure.classList.toggle("large", Math.max(img.naturalWidth, img.naturalHeight) > 400);
          img.style.setProperty("--ratio", img.naturalWidth / img.naturalHeight);
        });
        figure.append(img);
        if (p.name || f.pictures.length > 1) figure.append(make("figcaption", "", p.name));
        return figure;
      })
    );
  }
  stage.querySelectorAll("img").forEach((img, i) => {
    const url = "data:image/png;base64," + f.pictures[i].png;
    if (img.src !== url) img.src = url;
  });
  stage.dataset.tick = f.tick;
}

const opened = new Map(); // path -> open or not, as the user left it

function drawFields(fields) {
  const box = $("fields");
  const top = box.scrollTop;
  box.replaceChildren(...fields.map(([key, node]) => field(key, node, key, 0)));
  box.scrollTop = top;
}

function field(key, node, path, depth) {
  const row = make("div", "field");
  const line = make("div", "line");
  line.append(make("span", "key", key));
  const nested = node.items !== undefined || node.preview !== undefined;
  if (nested) line.append(make("span", "kind", node.preview !== undefined ? node.kind : ""));
  const text = make("span", node.text.length > 80 && !nested ? "text long" : "text", node.text);
  text.title = node.kind;
  line.append(text);
  if (!nested || (node.items && !node.items.length && !node.more)) {
    row.append(line);
    return row;
  }
  const details = make("details");
  const summary = make("summary");
  const small = node.items ? node.items.length <= 12 : node.preview.length < 80;
  details.open = opened.get(path) ?? (depth < 1 && small);
  summary.append(line);
  details.append(summary);
  details.addEventListener("toggle", () => opened.set(path, details.open));
  if (node.items) {
    for (const [k, n] of node.items) details.append(field(k, n, `${path}/${k}`, depth + 1));
    if (node.more) details.append(make("div", "none", `… ${node.more} more`));
  } else {
    if (node.png) {
      const img = make("img");
      img.src = "data:image/png;base64," + node.png;
      img.alt = `${key} as a picture`;
      details.append(img);
    }
    details.append(make("pre", "", node.preview));
  }
  row.append(details);
  return row;
}

// --- video -----------------------------------------------------------------------------------------------------------

let exporting = null; // number of the export that runs

function openExport() {
  if (exporting === null) {
    $("export-fps").value = $("speed").value;
    $("export-first").value = 0;
    $("export-first").max = $("export-last").max = $("export-last").value = at.ticks - 1;
    $("export-note").textContent = `${at.renderer} of ${at.episode}`;
    $("export-result").hidden = $("export-error").hidden = $("export-progress").hidden = true;
  }
  pause();
  $("exporting").showModal();
}

async function makeVideo() {
  const { trial, episode, renderer } = at;
  const number = (id) => Number($(id).value);
  $("export-result").hidden = $("export-error").hidden = true;
  $("export-start").disabled = true;
  try {
    let e = await ask("/api/export", null, {
      trial, episode, renderer, format: $("export-format").value,
      fps: number("export-fps"), first: number("export-first"), last: number("export-last"),
    });
    exporting = e.number;
    $("export-stop").hidden = $("export-progress").hidden = false;
    while (e.state === "running" || e.state === "writing") {
      $("export-progress").max = e.total;
      $("export-progress").value = e.done;
      $("export-note").textContent = e.state === "writing" ? "Writing the file …" : `${e.done} of ${e.total} ticks`;
      await new Promise((done) => setTimeout(done, 150));
      e = await ask("/api/export", { number: e.number });
    }
    $("export-note").textContent = e.state === "stopped" ? "Stopped." : "";
    if (e.state === "failed") throw new Error(e.error);
    if (e.state === "done") showVideo(trial, e);
  } catch (e) {
    $("export-note").textContent = "No video was made.";
    $("export-error").hidden = false;
    $("export-error").textContent = e.message;
  } finally {
    exporting = null;
    $("export-start").disabled = false;
    $("export-stop").hidden = $("export-progress").hidden = true;
  }
}

function showVideo(trial, e) {
  const url = "/video?" + new URLSearchParams({ trial, file: e.file });
  const show = make(e.file.endsWith(".gif") ? "img" : "video");
  if (show.tagName === "VIDEO") Object.assign(show, { controls: true, loop: true, muted: true, autoplay: true });
  else show.alt = e.file;
  show.src = url;
  const link = make("a", "", "Download " + e.file);
  link.href = url + "&download=1";
  link.download = e.file;
  $("export-result").replaceChildren(show, link, make("p", "", `Saved as ${e.path}`));
  $("export-result").hidden = false;
}

// --- events ----------------------------------------------------------------------------------------------------------

$("trial").addEventListener("change", (e) => chooseTrial(e.target.value).catch((x) => problem("", x.message)));
$("renderer").addEventListener("change", (e) => chooseRenderer(e.target.value));
$("episodes").addEventListener("click", (e) => {
  const button = e.target.closest("button");
  if (!button) return;
  seen?.add(button.dataset.name);
  button.classList.remove("new");
  chooseEpisode(button.dataset.name);
});
$("find").addEventListener("input", () => list().catch((x) => problem("", x.message)));
$("refresh").addEventListener("click", poll);
$("slider").addEventListener("input", (e) => {
  pause();
  go(Number(e.target.value));
});
$("first").addEventListener("click", () => step(-at.ticks));
$("back").addEventListener("click", () => step(-1));
$("next").addEventListener("click", () => step(1));
$("last").addEventListener("click", () => step(at.ticks));
$("play").addEventListener("click", () => (playing ? pause() : play()));
$("export").addEventListener("click", openExport);
$("export-close").addEventListener("click", () => $("exporting").close());
$("export-stop").addEventListener("click", () => exporting !== null && ask("/api/stop", null, { number: exporting }));
$("export-form").addEventListener("submit", (e) => {
  e.preventDefault();
  makeVideo();
});

document.addEventListener("keydown", (e) => {
  const typing = e.target.matches("select, input:not([type=range]):not([type=checkbox])");
  const pressing = e.key === " " && e.target.matches("button, summary, a, [type=checkbox]");
  if (typing || pressing || e.ctrlKey || e.metaKey || e.altKey || $("exporting").open) return;
  const keys = {
    " ": () => (playing ? pause() : play()),
    ArrowLeft: () => step(e.shiftKey ? -10 : -1),
    ArrowRight: () => step(e.shiftKey ? 10 : 1),
    ArrowUp: () => faster(1),
    ArrowDown: () => faster(-1),
    Home: () => step(-at.ticks),
    End: () => step(at.ticks),
  };
  if (!keys[e.key]) return;
  e.preventDefault();
  keys[e.key]();
});

// Who clicks with a mouse means the keys for the player, not for the button that was clicked.
document.addEventListener("click", (e) => e.detail && e.target.closest("main button, main summary, main [type=checkbox]")?.blur());
for (const id of ["trial", "renderer", "speed"]) $(id).addEventListener("change", (e) => e.target.blur());

setInterval(poll, POLL_MS);
start().catch((e) => problem("", e.message));
