// The tab "Context Parallel" in ComfyUI's sidebar: what every rank is doing. Fed by events of the server, see
// cp_runtime/comfy/events.py; it asks only once when the page opens and after a lost connection.

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
const HOW_TO_MEASURE = "Known after CP Sampler has run this model and size with world_size 1.";

let status = null;
let restarting = false;
const panels = new Set();

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
  const list = make("div", "cp-facts", null, fact("Ranks", `${now.world_size} (${now.backend})`));
  if (now.models.length) list.append(fact("Models", now.models.join(", ")));
  const call = now.last_call;
  if (!call) return list;
  list.append(fact("Mesh", mesh(call), "Axes of the last denoise call: batch × ring × Ulysses"));
  list.append(fact("Denoise call", seconds(call.seconds), "The last one. A step of most samplers is one call, or two with CFG."));
  const alone = call.seconds_on_one_device;
  const compared = alone ? `${seconds(alone)} (${(alone / call.seconds).toFixed(2)} ×)` : NOT_MEASURED;
  list.append(fact("On one device", compared, alone ? "Measured by CP Sampler with one device" : HOW_TO_MEASURE));
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

function errorCard(error) {
  const where = error.rank === null ? "Last error" : `Last error, rank ${error.rank}`;
  const title = `${where}, ${new Date(error.time * 1000).toLocaleTimeString()}`;
  const copy = button("Copy", "pi-copy", async (element) => {
    const copied = await copyText(error.message);
    element.lastChild.textContent = copied ? "Copied" : "Not copied";
  });
  return make("div", "cp-error", null, make("strong", "", title), make("pre", "", error.message), copy);
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
    status = answer.status;
    problem = answer.error;
  } catch (error) {
    problem = String(error);
  }
  restarting = false;
  show();
  if (problem) app.extensionManager.toast.add({ severity: "error", summary: "Workers did not restart", detail: problem, life: 15000 });
}

function draw(panel) {
  const now = status;
  if (!now) return panel.replaceChildren(make("p", "cp-quiet", "Waiting for the server…"));
  const shown = restarting ? "starting" : now.state;
  const parts = [make("div", `cp-headline cp-${shown}`, STATES[shown] ?? shown)];
  if (now.activity && ["starting", "loading", "computing"].includes(now.state)) parts.push(make("p", "cp-activity", now.activity));
  if (now.state === "off") parts.push(make("p", "cp-quiet", NO_WORKERS));
  else parts.push(facts(now), ...now.ranks.map(rankCard));
  if (now.last_error) parts.push(errorCard(now.last_error));
  if (now.state !== "off") {
    const again = button(restarting ? "Restarting…" : "Restart workers", "pi-refresh", restart);
    again.disabled = restarting;
    parts.push(again);
  }
  panel.replaceChildren(...parts);
}

function show() {
  for (const panel of panels) draw(panel);
}

async function ask() {
  try {
    const answer = await api.fetchApi(STATUS);
    if (answer.ok) status = await answer.json();
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
        const panel = make("div", "cp-panel");
        panel.dataset.testid = "context-parallel-panel";
        panels.add(panel);
        element.replaceChildren(panel);
        draw(panel);
      },
      destroy() {
        panels.clear();
      },
    });
    await ask();
  },
});
