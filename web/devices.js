// The devices of this machine, and which of them compute: what CP Config nodes of the open graph say, or else the panel's own choice.

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { graphs } from "./use_all_gpus.js";

const DEVICES = "/context_parallel/devices";
const ACTIVE = 0; // mode of a node

let found = null;
let configs = null; // CP Config nodes of the open graph; null = nobody has looked since it changed

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

/** Names of the devices that a text of CP Config means. Empty = the first `count`, or all. Ranks on the CPU may have no numbers. */
export function chosen(text, count, devices) {
  const names = devices.map((device) => device.name);
  const parts = text.split(",").map((part) => part.trim());
  const numbered = parts.map((part, at) => (part === "cpu" ? `cpu:${at}` : part));
  const on = names.length && text.trim() ? [...new Set(numbered)].filter((name) => names.includes(name)) : [];
  return on.length ? on : names.slice(0, count || names.length);
}

/** The text of CP Config once a device was taken in or out. All of them, in their order, are an empty text; one stays. */
export function withOther(on, name, devices) {
  const names = devices.map((device) => device.name);
  const sorted = names.filter((each) => on.includes(each)).join() === on.join();
  const rest = on.filter((each) => each !== name);
  let now = rest.length < on.length ? rest : [...on, name];
  if (sorted) now = names.filter((each) => now.includes(each));
  if (!now.length) now = on;
  return now.join() === names.join() ? "" : now.join(",");
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

/** Who chooses: `on`, the names of the devices; `by`, "config" or "panel"; "fixed" where the panel cannot write that. */
export function choice(settings, devices) {
  const nodes = working();
  if (!nodes.length) return { by: "panel", on: chosen(settings.devices, 0, devices) };
  const each = nodes.map((node) => chosen(widget(node, "devices").value, widget(node, "world_size").value, devices));
  const given = (name) => nodes.some((node) => node.inputs?.some((input) => input.widget?.name === name && input.link !== null));
  const fixed = given("devices") || given("world_size") || new Set(each.map(String)).size > 1;
  return { by: fixed ? "fixed" : "config", on: each[0] };
}

/** Take a device in or out: in the nodes, as one step of undo, or by `prefer`, which tells the server. */
export function switchDevice(name, settings, devices, prefer) {
  const { by, on } = choice(settings, devices);
  const text = withOther(on, name, devices);
  if (by === "panel") return prefer({ devices: text });
  app.canvas.emitBeforeChange();
  for (const node of working()) {
    widget(node, "devices").value = text;
    widget(node, "world_size").value = 0; // as many as there are names
  }
  app.canvas.emitAfterChange();
  app.canvas.setDirty(true, true);
  return null;
}

api.addEventListener("graphChanged", forget);
app.registerExtension({ name: "context_parallel.devices", afterConfigureGraph: forget });
