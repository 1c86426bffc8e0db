// Other computers that work for this one: how each is, a command for another one, and a button that sends one away.

import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";
import { button, copyButton, make } from "./elements.js";
import { t } from "./texts.js";

const MACHINES = "/context_parallel/machines";
const FOLDER = new URL("..", import.meta.url).pathname.split("/").at(-2); // of this pack, as it was cloned
const JOIN = `python custom_nodes/${decodeURIComponent(FOLDER)}/cp_runtime/machines/join.py`;
const INTERVAL = 2000; // milliseconds between two looks while the list is open
const PORT = 8289;

let code = null; // for other computers; the server gives it to whoever adds one, and to nobody else

export function otherComputers() {
  const list = make("div", "cp-lists");
  const command = make("pre");
  command.tabIndex = 0; // it scrolls
  const stop = button("pi-times", () => change({ remove: "" })); // listens no more, unless a computer is there
  stop.say(t("machines.stop"));
  const buttons = make("div", "cp-buttons", null, copyButton(command), stop);
  const join = make("div", "cp-facts", null, make("p", "cp-note", t("machines.run")), command, buttons);
  const add = button("pi-plus", invite);
  add.say(t("machines.add"));
  const element = make("details", "cp-machines", null, make("summary", "", t("machines.title")), list, join, add);
  let address = "";

  async function send(body) {
    const answer = await api.fetchApi(MACHINES, body && { method: "POST", body: JSON.stringify(body) });
    const found = await answer.json();
    if (found.error) throw new Error(found.error);
    return found;
  }

  async function change(body) {
    try {
      code = (await send(body)).code ?? code; // `look` forgets it with the last computer
    } catch (error) {
      app.extensionManager.toast.add({ severity: "error", summary: t("machines.failed"), detail: error.message, life: 15000 });
    }
    await look();
  }

  async function invite() {
    const message = `${t("machines.address")} ${t("machines.open")}`;
    const question = { title: t("machines.add"), message, defaultValue: `${address}:${PORT}` };
    const answer = await app.extensionManager.dialog.prompt(question);
    if (answer) await change({ add: answer });
  }

  async function look() {
    const found = await send().catch(() => null);
    if (!found) return; // ComfyUI says itself that it is away
    ({ address } = found);
    if (!found.listens) code = null;
    join.hidden = !code;
    add.hidden = Boolean(code); // it is good for any number of computers
    command.textContent = code ? `${JOIN} ${code}` : "";
    const names = found.machines.map((machine) => machine.name);
    for (const child of [...list.children]) if (!names.includes(child.dataset.machine)) child.remove();
    for (const machine of found.machines) {
      let there = [...list.children].find((child) => child.dataset.machine === machine.name);
      if (!there) list.append((there = line(machine.name, () => change({ remove: machine.name }))));
      there.update(machine);
    }
  }

  element.addEventListener("toggle", () => {
    if (!element.open) return;
    look();
    const timer = setInterval(() => (element.open && element.isConnected ? look() : clearInterval(timer)), INTERVAL);
  });
  return element;
}

/** A computer; its `update` takes what the server says of it. Its button keeps the focus. */
function line(name, remove) {
  const gone = button("pi-times", remove);
  gone.say(t("machines.remove"));
  const words = make("span", "cp-activity");
  const element = make("div", "cp-rank", null, make("span", "cp-device", null, make("strong", "", name), words), gone);
  element.dataset.machine = name;
  element.update = ({ state, why, devices }) => {
    const own = (devices ?? []).map((device) => `${name}/${device}`).join(", ");
    words.textContent = [t(`machines.state.${state}`), own, ...why].filter(Boolean).join("\n");
  };
  return element;
}
