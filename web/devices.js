// The devices of this computer, and which of them and of others compute: what CP Config nodes of the open graph say, or else the panel's own choice.

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { graphs } from "./panel/graphs.js";
import { t } from "./panel/texts.js";

const DEVICES = "/context_parallel/devices";
const ACTIVE = 0; // mode of a node
const HELPED = ["single", "hidden"]; // reasons for one device that those of other computers do away with

let found = null;
let configs = null; // CP Config nodes of the open graph; null = nobody has looked since it changed
let listed = []; // other devices that had a switch when one was pressed: one that was taken out can be put back

/** What the server found: see `found_devices` in cp_runtime/comfy/ui/runtime.py. Asked for once, and again where that failed. */
export function foundDevices() {
  found ??= api.fetchApi(DEVICES).then((answer) => answer.json());
  found.catch(() => (found = null));
  return found;
}

/** A device as menus have it: "cuda:1 RTX 3090 24 GB". */
export function labelOf({ name, title, memory }) {
  return [name, title, gigabytes(memory)].filter(Boolean).join(" ");
}

export function gigabytes(memory) {
  return memory ? `${Math.round(memory / 2 ** 30)} GB` : "";
}

/** What is known of a device that a text names beyond the list: what its computer told when it was checked. */
export function otherDevice(name, devices, hosts = []) {
  const told = hosts.flatMap((host) => host.devices).find((device) => device.name === name);
  const more = name.startsWith("cpu") && devices[0]?.name.startsWith("cpu"); // processes, as many as one likes
  return told ?? { name, title: name.includes("/") || more ? "" : t("devices.unknown"), memory: 0 };
}

/** What a text of CP Config means: `on`, names in the list; `others`, all else that it names, other computers' last, in their order.
 * Empty = the first `count`, or all. Ranks on the CPU may have no numbers. */
export function chosen(text, count, devices) {
  const names = devices.map((device) => device.name);
  const parts = text.split(",").map((part) => part.trim()).filter(Boolean);
  if (!parts.length) return { on: names.slice(0, count || names.length), others: [] };
  const numbered = (part, at) => (names.includes(`${part}:0`) ? `${part}:${part === "cpu" ? at : 0}` : part);
  const here = parts.filter((part) => !part.includes("/")).map(numbered);
  const unknown = here.filter((name) => !names.includes(name));
  const on = [...new Set(here)].filter((name) => names.includes(name));
  return { on, others: [...unknown, ...parts.filter((part) => part.includes("/"))] };
}

/** The text of CP Config once a device was taken in or out. The whole list, in its order, is an empty text; one of it stays. */
export function withOther({ on, others }, name, devices) {
  const names = devices.map((device) => device.name);
  const flipped = (all) => (all.includes(name) ? all.filter((each) => each !== name) : [...all, name]);
  if (!names.includes(name)) return textOf(on, flipped(others), names);
  const sorted = names.filter((each) => on.includes(each)).join() === on.join();
  let now = flipped(on);
  if (sorted) now = names.filter((each) => now.includes(each));
  return textOf(now.length ? now : on, others, names);
}

function textOf(on, others, names) {
  return !others.length && on.join() === names.join() ? "" : [...on, ...others].join(",");
}

function widget(node, name) {
  return node.widgets.find((each) => each.name === name);
}

/** CP Config nodes of the open graph that are at work. Events of the server come several times a second: they walk no graph. */
function working() {
  configs ??= graphs().flatMap((graph) => graph.nodes.filter((node) => node.type === "CPConfig"));
  return configs.filter((node) => node.mode === ACTIVE);
}

/** Look at the graph again: it has changed. */
export function forget() {
  configs = null;
}

/** What a CP Config node chooses. */
export function chosenIn(node, devices) {
  return chosen(widget(node, "devices").value, widget(node, "world_size").value, devices);
}

/** Write a text into a CP Config node. */
export function write(node, text) {
  widget(node, "devices").value = text;
  widget(node, "world_size").value = 0; // as many as there are names
}

/** Who chooses: `on` and `others` as in `chosen`; `by`, "config" or "panel", "fixed" where the panel cannot write that; `listed`,
 * the others that have a switch. */
export function choice(settings, devices) {
  const nodes = working();
  const each = nodes.length ? nodes.map((node) => chosenIn(node, devices)) : [chosen(settings.devices, 0, devices)];
  const given = (name) => nodes.some((node) => node.inputs?.some((input) => input.widget?.name === name && input.link !== null));
  const fixed = given("devices") || given("world_size") || new Set(each.map((one) => JSON.stringify(one))).size > 1;
  const by = nodes.length ? "config" : "panel";
  return { ...each[0], by: fixed ? "fixed" : by, listed: [...new Set([...listed, ...each[0].others])] };
}

/** Why one device computes alone, as a status says it: not where other computers are named. */
export function aloneIn({ alone, settings }) {
  const nodes = working();
  const texts = nodes.length ? nodes.map((node) => widget(node, "devices").value) : [settings?.devices ?? ""];
  return HELPED.includes(alone?.case) && texts.some((text) => text.includes("/")) ? null : alone;
}

/** Take a device in or out: in the nodes, as one step of undo, or by `prefer`, which tells the server. */
export function switchDevice(name, settings, devices, prefer) {
  const now = choice(settings, devices);
  const text = withOther(now, name, devices);
  listed = now.listed;
  if (now.by === "panel") return prefer({ devices: text });
  app.canvas.emitBeforeChange();
  for (const node of working()) write(node, text);
  app.canvas.emitAfterChange();
  app.canvas.setDirty(true, true);
  return null;
}

api.addEventListener("graphChanged", forget);
app.registerExtension({
  name: "context_parallel.devices",
  afterConfigureGraph() {
    forget();
    listed = []; // they were of another workflow
  },
});
