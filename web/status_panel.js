// The tab "Context Parallel" in ComfyUI's sidebar: what every rank is doing. Fed by events of the server, see
// cp_runtime/comfy/ui/events.py; it asks only once when the page opens and after a lost connection.

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";

const EVENT = "context_parallel.status";
const STATUS = "/context_parallel/status";
const RESTART = "/context_parallel/restart";
const STATES = {
  off: "no workers",
  starting: "starting",
  loading: "loading",
  computing: "computing",
  idle: "idle",
  failed: "failed",
  silent: "no sign of life",
  gone: "gone",
};
const NO_WORKERS = "Workers start with the next prompt whose model goes through Apply Context Parallel.";
const NOT_MEASURED = "not measured";
const PROCESSES = "Processes that compute, and the library through which they communicate";
const BETWEEN = "From one call to the next, the mean of this run. A step of most samplers is one call, or two with CFG.";
const LAST = "The last one. A step of most samplers is one call, or two with CFG.";
const MEASURED = "From one call to the next, as CP Sampler measured it on one device; in brackets how many times as fast all are";
const HOW_TO_MEASURE = "Known after CP Sampler has run the same model and sizes with world_size 1, with two calls or more.";

let status = null;
let version = 0; // of the status: an answer that was asked for before an event came is older than the event
let restarting = false;
let panel = null;
let dismissed = null; // the time of the error that need not be shown any more

/** An element with text and children. Text is never parsed as HTML: errors hold what other programs wrote. */
function make(tag, className, text, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined && text !== null) element.textContent = text;
  element.append(...children);
  return element;
}

function seconds(value) {
  return value < 0.1 ? `${(value * 1000).toFixed(1)} ms` : `${value.toPrecision(3)} s`;
}

function gibibytes(value) {
  return `${(value / 2 ** 30).toFixed(2)} GiB`;
}

function mesh(call) {
  const axes = Object.entries(call.degrees).filter(([, degree]) => degree > 1);
  return axes.map(([axis, degree]) => `${axis} ${degree}`).join(" × ") || "one rank";
}

function fact(name, value, hint) {
  const row = make("div", "cp-fact", null, make("span", "cp-name", name), make("span", "cp-value", value));
  if (hint) row.title = hint;
  return row;
}

function facts(now) {
  const workers = [`${now.world_size} ranks`];
  if (now.backend) workers.push(now.backend);
  if (now.peer_to_peer === false) workers.push("no peer-to-peer");
  const list = make("div", "cp-facts", null, fact("Workers", workers.join(", "), PROCESSES));
  const models = Object.entries(now.weights); // "sharded: 64 GB of weights as 2 × 35 GB of 48 GB", by file
  const names = models.map(([model, reason]) => `${model} (${reason.match(/^\w+/)[0]})`);
  if (models.length) list.append(fact("Models", names.join(", "), models.map(([, reason]) => reason).join("\n")));
  const call = now.last_call;
  if (!call) return list;
  const ran = call.choice ? `. It ran on ${call.choice}.` : "";
  const fewer = now.ranks.filter((rank) => rank.idle).length;
  const used = fewer ? `${mesh(call)} (${now.world_size - fewer} of ${now.world_size})` : mesh(call);
  list.append(fact("Mesh", used, `Axes of the last denoise call: batch × ring × Ulysses${ran}`));
  const [together, alone] = [call.seconds_per_call, call.seconds_per_call_on_one_device];
  list.append(fact("Denoise call", seconds(together ?? call.seconds), together ? BETWEEN : LAST));
  const times = alone && together ? ` (${(alone / together).toFixed(2)} ×)` : "";
  list.append(fact("On one device", alone ? `${seconds(alone)}${times}` : NOT_MEASURED, alone ? MEASURED : HOW_TO_MEASURE));
  const share = `${(call.communication_share * 100).toFixed(0)} %`;
  list.append(fact("Communication", share, "Part of a call that rank 0 waits for other ranks and for the link"));
  return list;
}

function rankCard(rank) {
  const state = make("span", `cp-state cp-${rank.state}`, STATES[rank.state] ?? rank.state);
  const title = make("div", "cp-rank-title", null, make("strong", "", `Rank ${rank.rank}`), make("span", "", rank.device), state);
  const memory = [`host ${gibibytes(rank.memory.host)}`];
  if (rank.memory.device) memory.push(`device ${gibibytes(rank.memory.device)}`);
  const card = make("div", "cp-rank", null, title, fact("Memory", memory.join(", "), "Host: resident now. Device: peak of the last call"));
  const tokens = Object.entries(rank.tokens).map(([stream, count]) => `${count} ${stream}`);
  if (tokens.length) card.append(fact("Tokens", tokens.join(", "), "Tokens of each stream that this rank computes"));
  card.append(fact("Process", String(rank.pid)));
  card.dataset.rank = rank.rank;
  return card;
}

function button(label, icon, onClick) {
  const element = make("button", "cp-button", null, make("i", `pi ${icon}`), make("span", "", label));
  element.type = "button";
  element.addEventListener("click", () => onClick(element));
  return element;
}

/** The last error. Kept until it is dismissed or there is another, so that it can be read and selected while events come in. */
function errorCard() {
  const title = make("strong");
  const text = make("pre");
  const copy = button("Copy", "pi-copy", async () => {
    copy.lastChild.textContent = (await copyText(text.textContent)) ? "Copied" : "Not copied";
  });
  const dismiss = button("Dismiss", "pi-times", () => {
    dismissed = shown;
    card.hidden = true;
  });
  const card = make("div", "cp-error", null, title, text, make("div", "cp-buttons", null, copy, dismiss));
  let shown = null;
  card.update = (error) => {
    card.hidden = !error || error.time === dismissed;
    if (!error || error.time === shown) return;
    shown = error.time;
    const when = `Last error, at ${new Date(error.time * 1000).toLocaleTimeString()}`;
    title.textContent = error.rank === null ? when : `${when}, rank ${error.rank}`;
    text.textContent = error.message;
    copy.lastChild.textContent = "Copy";
  };
  return card;
}

/** The clipboard's own interface is there on https and localhost only; ComfyUI is often used over plain http. */
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = make("textarea", "", text);
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}

async function restart() {
  const used = ["starting", "loading", "computing"].includes(status?.state);
  const question = { title: "Restart workers", message: "A prompt that is running on them fails. Restart the workers?" };
  if (used && !(await app.extensionManager.dialog.confirm(question))) return;
  restarting = true;
  show();
  let problem = null;
  try {
    const answer = await (await api.fetchApi(RESTART, { method: "POST" })).json();
    version += 1;
    status = answer.status;
    problem = answer.error;
  } catch (error) {
    problem = String(error);
  }
  restarting = false;
  show();
  if (problem) app.extensionManager.toast.add({ severity: "error", summary: "Workers did not restart", detail: problem, life: 15000 });
}

/** The panel. Only what has nothing to click or select is made anew by an event. */
function makePanel() {
  const headline = make("div", "cp-headline");
  const activity = make("p", "cp-activity");
  const body = make("div", "cp-body");
  const error = errorCard();
  const again = button("Restart workers", "pi-refresh", restart);
  const head = make("div", "cp-head", null, headline, again); // above what may be long
  const element = make("div", "cp-panel", null, head, activity, body, error);
  element.dataset.testid = "context-parallel-panel";
  element.update = (now) => {
    const state = restarting ? "starting" : now?.state;
    headline.textContent = now ? (STATES[state] ?? state) : "Waiting for the server…";
    headline.className = `cp-headline cp-${state}`;
    headline.title = now?.version ? `Context Parallel ${now.version}` : "";
    const quiet = now?.state === "off" ? NO_WORKERS : "";
    activity.textContent = ["starting", "loading", "computing"].includes(now?.state) ? now.activity : quiet;
    activity.hidden = !activity.textContent;
    body.replaceChildren(...(!now || now.state === "off" ? [] : [facts(now), ...now.ranks.map(rankCard)]));
    error.update(now?.last_error);
    again.hidden = !now || now.state === "off";
    again.disabled = restarting;
    again.lastChild.textContent = restarting ? "Restarting…" : "Restart workers";
  };
  return element;
}

function show() {
  panel?.update(status);
}

async function ask() {
  const asked = version;
  try {
    const answer = await api.fetchApi(STATUS);
    const now = answer.ok ? await answer.json() : status;
    if (version === asked) status = now;
  } catch {
    // The server is away; ComfyUI says so itself, and "reconnected" asks again.
  }
  show();
}

app.registerExtension({
  name: "context_parallel.status_panel",
  async setup() {
    const style = make("link");
    style.rel = "stylesheet";
    style.href = new URL("./status_panel.css", import.meta.url).href;
    document.head.append(style);
    api.addEventListener(EVENT, ({ detail }) => {
      version += 1;
      status = detail;
      show();
    });
    api.addEventListener("reconnected", ask);
    app.extensionManager.registerSidebarTab({
      id: "context-parallel",
      icon: "pi pi-sitemap",
      title: "Context Parallel",
      tooltip: "Context Parallel: what every rank is doing",
      type: "custom",
      render(element) {
        panel = makePanel();
        element.replaceChildren(panel);
        show();
      },
    });
    await ask();
  },
});
