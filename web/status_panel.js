// The tab "Context Parallel" in ComfyUI's sidebar: what every rank is doing. Fed by events of the server, see
// cp_runtime/comfy/ui/server.py; it asks only once when the page opens and after a lost connection.

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { make } from "./panel/elements.js";
import { makePanel } from "./panel/panel.js";
import { languageNow, loadTexts, onLanguage, spoken, t } from "./panel/texts.js";

const EVENT = "context_parallel.status";
const STATUS = "/context_parallel/status";
const RESTART = "/context_parallel/restart";
const MEASURE = "/context_parallel/measure";
const SETTINGS = "/context_parallel/settings";
const HOSTS = "/context_parallel/hosts";
const LANGUAGE = "/context_parallel/language";

let status = null;
let version = 0; // of the status: an answer that was asked for before an event came is older than the event
let skew = 0; // seconds that this clock is ahead of the server's
let restarting = false;
let panel = null;
let told = ""; // client and language that the server knows

function show() {
  panel?.update(status, { restarting, skew });
}

function open(element) {
  panel = makePanel({ restart, measure, prefer, check });
  element.replaceChildren(panel);
  show();
}

/** Have the server do something, take the status that it answers with, and say what went wrong. Returns whether nothing did. */
async function send(method, path, summary, body) {
  let problem = null;
  try {
    const answer = await (await api.fetchApi(path, { method, body: body && JSON.stringify(body) })).json();
    version += 1;
    status = answer.status;
    problem = answer.error && spoken({ message: answer.error, translations: answer.translations });
  } catch (error) {
    problem = String(error);
  }
  if (problem) app.extensionManager.toast.add({ severity: "error", summary, detail: problem, life: 15000 });
  return !problem;
}

async function restart() {
  const used = ["starting", "loading", "computing"].includes(status?.state);
  const question = { title: t("restart"), message: t("restart_question") };
  if (used && !(await app.extensionManager.dialog.confirm(question))) return;
  restarting = true;
  show();
  await send("POST", RESTART, t("not_restarted"));
  restarting = false;
  show();
}

/** Have the next run measure a call on one device, or stop that. */
async function measure(stop) {
  await send(stop ? "DELETE" : "POST", MEASURE, t("not_measured"));
  show();
}

/** Keep what a switch of the panel says. */
async function prefer(changes) {
  await send("POST", SETTINGS, t("not_kept"), changes);
  show();
}

/** Have the server look whether another computer can work for this one. */
async function check(host) {
  const done = await send("POST", HOSTS, t("hosts.not_checked"), { host });
  show();
  return done;
}

/** Tell the server this browser's language: it writes the texts under nodes. */
async function tellLanguage() {
  const own = JSON.stringify({ client: api.clientId, language: languageNow() });
  if (!api.clientId || own === told) return;
  told = own;
  await api.fetchApi(LANGUAGE, { method: "POST", body: own }).catch(() => (told = ""));
}

async function ask() {
  const asked = version;
  try {
    const [answer] = await Promise.all([api.fetchApi(STATUS), loadTexts()]);
    const now = answer.ok ? await answer.json() : status;
    if (version === asked) status = now;
    skew = (Date.now() - Date.parse(answer.headers.get("Date"))) / 1000 || 0;
  } catch {
    // The server is away; ComfyUI says so itself, and "reconnected" asks again.
  }
  show();
}

app.registerExtension({
  name: "context_parallel.status_panel",
  afterConfigureGraph: show,
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
    api.addEventListener("reconnected", () => {
      told = ""; // it may be another server
      tellLanguage();
      ask();
    });
    api.addEventListener("status", tellLanguage); // with the first one comes the id of this client
    api.addEventListener("graphChanged", show); // its button says what it would do with the graph that is open
    onLanguage(() => {
      tellLanguage();
      if (panel?.isConnected) open(panel.parentElement);
    });
    tellLanguage();
    await ask();
    app.extensionManager.registerSidebarTab({
      id: "context-parallel",
      icon: "pi pi-sitemap",
      title: "Context Parallel",
      tooltip: t("tooltip"),
      type: "custom",
      render: open,
    });
  },
});
