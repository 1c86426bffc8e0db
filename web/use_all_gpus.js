// "Use all GPUs in this workflow": puts Apply Context Parallel in front of every sampler and guider of the open graph and its
// subgraphs, and CP VAE Decode, CP VAE Encode and CP Upscale Image in place of ComfyUI's, and takes them out again. In the panel, the
// menu of the canvas, and as a command with a key; for what is selected, nodes or groups, as another command and in the menu of a node.

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { aloneIn, choice, forget, foundDevices } from "./devices.js";
import { graphs } from "./panel/graphs.js";
import { t } from "./panel/texts.js";

const APPLY = "ApplyContextParallel";
const CONFIG = "CPConfig";
const COMMAND = "ContextParallel.UseAllGPUs";
const SELECTED = "ContextParallel.UseAllGPUsForSelection";
const UPSCALE = "ImageUpscaleWithModel";
const OURS = { VAEDecode: "CPVAEDecode", VAEEncode: "CPVAEEncode", [UPSCALE]: "CPUpscaleImage" }; // what takes the place of a node
const STOCK = Object.fromEntries(Object.entries(OURS).map((pair) => pair.reverse()));
const SAMPLED = ["LATENT", "GUIDER", "IMAGE", "VIDEO", "AUDIO"]; // what a node gives that samples; one for MODEL to MODEL or SIGMAS does not
const BYPASSED = 4; // modes of a node
const MUTED = 2;
const INPUT = -10; // what ComfyUI calls the origin of a link that comes from outside of a subgraph
const OUTPUT = -20;
const GAP = 30; // pixels between nodes
const MADE_WAY = "contextParallelMadeWay"; // in `extra` of a graph: what moved, by node
const TITLE = 30; // height of a title, which stands above a node's position

// Links of a subgraph that was made in the browser name its edge by text, those of a loaded one by number.
const fromOutside = (link) => Number(link.origin_id) === INPUT;
const toOutside = (link) => Number(link.target_id) === OUTPUT;

function linkOf(graph, id) {
  return id === null || id === undefined ? null : graph.getLink(id);
}

function samples(node) {
  const given = node.outputs?.map((output) => output.type) ?? [];
  return node.mode === 0 && !node.subgraph && !given.includes("MODEL") && given.some((type) => SAMPLED.includes(type));
}

/** The links that bring samplers and guiders of a graph their models. `chosen`: of which nodes; all without. */
function models(graph, chosen) {
  return graph.nodes.filter((node) => samples(node) && (!chosen || chosen.has(node))).flatMap((node) => {
    const inputs = node.inputs?.filter((input) => input.type === "MODEL") ?? [];
    return inputs.map((input) => linkOf(graph, input.link)).filter(Boolean);
  });
}

/** Whether the model of a link has come through Apply Context Parallel. */
function applied(graph, link, seen = new Set()) {
  if (!link || seen.has(link)) return false;
  seen.add(link);
  if (fromOutside(link)) {
    const outside = graphs().flatMap((outer) => outer.nodes.filter((node) => node.subgraph === graph).map((node) => [outer, node]));
    const links = outside.map(([outer, node]) => [outer, linkOf(outer, node.inputs[link.origin_slot]?.link)]);
    return links.length > 0 && links.every(([outer, each]) => applied(outer, each, seen));
  }
  const node = graph.getNodeById(link.origin_id);
  if (!node) return false;
  if (node.type === APPLY && node.mode === 0) return true;
  if (node.subgraph) {
    const inside = node.subgraph.outputNode.slots[link.origin_slot]?.linkIds[0];
    return applied(node.subgraph, linkOf(node.subgraph, inside), seen);
  }
  const inputs = node.inputs?.filter((input) => ["MODEL", "*"].includes(input.type)) ?? [];
  return inputs.some((input) => applied(graph, linkOf(graph, input.link), seen));
}

function missing(chosen) {
  return graphs().map((graph) => [graph, models(graph, chosen).filter((link) => !applied(graph, link))]);
}

/** The nodes that upscale with a model, ours or not. */
function upscalers(chosen) {
  const own = (node) => [UPSCALE, OURS[UPSCALE]].includes(node.type) && node.mode === 0 && (!chosen || chosen.has(node));
  return graphs().flatMap((graph) => graph.nodes.filter(own));
}

/** Whether there is a sampler or an upscaler, and the model of each is shared out. */
export function usesAll(chosen) {
  const upscaling = upscalers(chosen);
  const some = upscaling.length > 0 || graphs().some((graph) => models(graph, chosen).length > 0);
  const shared = missing(chosen).every(([, links]) => links.length === 0);
  return some && shared && upscaling.every((node) => node.type !== UPSCALE);
}

/** The nodes that are selected, those in selected groups, and all inside of a selected subgraph. */
function selection() {
  const chosen = new Set();
  const add = (node) => {
    chosen.add(node);
    node.subgraph?.nodes.forEach(add);
  };
  for (const item of app.canvas.selectedItems) {
    if (item.children) {
      item.recomputeInsideNodes?.();
      for (const child of item.children) if (child.inputs || child.outputs) add(child);
    } else if (item.inputs || item.outputs) add(item);
  }
  return chosen;
}

/** Connect what a link comes from with an input, or a slot of the subgraph's outputs; lines keep their bends. */
function connect(graph, link, node, slot) {
  if (fromOutside(link)) return graph.inputNode.slots[link.origin_slot].connect(node.inputs[slot], node, link.parentId);
  return graph.getNodeById(link.origin_id).connect(link.origin_slot, node, slot, link.parentId);
}

function meets({ pos, size }, [x, y], [width, height]) {
  const apart = [pos[0] - x - width, x - pos[0] - size[0], pos[1] - TITLE - y - height, y - TITLE - pos[1] - size[1]];
  return apart.every((distance) => distance < GAP / 2);
}

function overlaps(graph, place, size) {
  return graph.nodes.some((node) => meets(node, place, size));
}

/** A free place beside a node, or above or below it, as near as there is one. */
function placeFor(graph, size, beside) {
  const [x, y] = [beside.pos[0] - size[0] - GAP, beside.pos[1]];
  const step = size[1] + TITLE + GAP;
  for (let row = 0; row < 40; row += 1) {
    for (const column of [0, size[0] + GAP]) {
      for (const sign of [-1, 1]) {
        const place = [x + column, y + sign * row * step];
        if (!overlaps(graph, place, size)) return place;
      }
    }
  }
  return [x, y];
}

function originOf(link) {
  return `${link.origin_id} ${link.origin_slot}`;
}

/** Put one node in front of links with the same origin. */
function insert(graph, links) {
  const node = LiteGraph.createNode(APPLY);
  graph.add(node);
  node.pos = placeFor(graph, node.size, graph.getNodeById(links[0].target_id));
  connect(graph, links[0], node, 0);
  for (const link of links) node.connect(0, graph.getNodeById(link.target_id), link.target_slot);
  const configs = graph.nodes.filter((each) => each.type === CONFIG);
  if (configs.length === 1) configs[0].connect(0, node, 1);
}

/** All that has a place in a graph, by name: nodes, the edges of a subgraph, groups. */
function placed(graph) {
  const nodes = [...graph.nodes, graph.inputNode, graph.outputNode].filter(Boolean).map((node) => [`node ${node.id}`, node]);
  return new Map([...nodes, ...graph.groups.map((group) => [`group ${group.id}`, group])]);
}

function rectangle({ pos, size, children }) {
  return [...pos, ...(children ? size : [])]; // a node may get another size by itself
}

function near({ pos, children }, axis) {
  return pos[axis] - (axis && !children ? TITLE : 0);
}

function far({ pos, size }, axis) {
  return pos[axis] + size[axis];
}

function shifted(pair, axis, by) {
  return [pair[0] + (axis ? 0 : by), pair[1] + (axis ? by : 0)];
}

/** Move all that is right of a node or below it, as much as the node has grown, if it is in the way. Groups grow with what they
 * hold. What was apart stays apart. The graph remembers what moved, for `giveBack`. */
function makeWay(graph, node, before) {
  const named = placed(graph);
  const others = [...named.values()].filter((each) => each !== node);
  const was = new Map([...named].map(([name, each]) => [name, rectangle(each)]));
  const holds = (each, axis) => near(each, axis) <= node.pos[axis] && far(each, axis) >= node.pos[axis] + before[axis];
  const groups = others.filter((each) => each.children && holds(each, 0) && holds(each, 1));
  for (const axis of [0, 1]) {
    const more = node.size[axis] - before[axis];
    const edge = node.pos[axis] + before[axis] - GAP / 2;
    const beyond = others.filter((each) => near(each, axis) >= edge);
    const covers = beyond.some((each) => meets(each, node.pos, node.size));
    if (more <= 0 || !(covers || groups.some((each) => far(each, axis) < far(node, axis)))) continue;
    for (const each of others.filter(({ pinned }) => !pinned)) {
      if (beyond.includes(each)) each.pos = shifted(each.pos, axis, more);
      else if (each.children && far(each, axis) >= edge) each.size = shifted(each.size, axis, more);
    }
  }
  const moved = [...named].map(([name, each]) => [name, was.get(name), rectangle(each)]);
  graph.extra ??= {};
  graph.extra[MADE_WAY] ??= {};
  graph.extra[MADE_WAY][node.id] = { size: [...before], moved: moved.filter(([, from, to]) => String(from) !== String(to)) };
}

/** Move back what made way for a node, unless somebody has moved it since. */
function giveBack(graph, node) {
  const { size, moved } = graph.extra?.[MADE_WAY]?.[node.id] ?? { size: node.size, moved: [] };
  node.setSize([...size]);
  const named = placed(graph);
  for (const [name, from, to] of moved) {
    const each = named.get(name);
    if (!each || String(rectangle(each)) !== String(to)) continue;
    each.pos = from.slice(0, 2);
    if (each.children) each.size = from.slice(2);
  }
  delete graph.extra?.[MADE_WAY]?.[node.id];
}

/** Put nodes of other types in the place of nodes. They keep id, links, title, place and mode; their first inputs are the same. */
function swap(types, chosen) {
  for (const graph of graphs()) {
    const swapped = graph.nodes.filter((node) => types[node.type] && (!chosen || chosen.has(node)));
    for (const old of types === OURS ? swapped : swapped.reverse()) {
      const node = LiteGraph.createNode(types[old.type]);
      const same = old.inputs.filter((input, slot) => input.type === node.inputs[slot]?.type && input.name === node.inputs[slot].name);
      old.inputs.forEach((input, slot) => !same.includes(input) && input.link != null && old.disconnectInput(slot));
      if (old.title !== old.constructor.title) node.title = old.title;
      Object.assign(node, { id: old.id, graph, mode: old.mode, pos: [...old.pos] });
      same.forEach((input, slot) => (node.inputs[slot].link = input.link));
      node.outputs[0].links = old.outputs[0].links;
      graph._nodes[graph._nodes.indexOf(old)] = node;
      graph._nodes_by_id[node.id] = node;
      old.graph = null;
      graph.onNodeRemoved?.(old);
      node.onAdded?.(graph);
      graph.onNodeAdded?.(node);
      graph.updateExecutionOrder();
      if (types === OURS) {
        node.setSize(node.size.map((least, axis) => Math.max(least, old.size[axis])));
        makeWay(graph, node, old.size);
      } else giveBack(graph, node);
    }
  }
}

function useAll(chosen) {
  for (const graph of chosen ? [] : graphs()) {
    for (const node of graph.nodes) if (node.type === APPLY && [BYPASSED, MUTED].includes(node.mode)) node.mode = 0;
  }
  for (const [graph, links] of missing(chosen)) {
    const origins = new Set(links.map(originOf));
    for (const origin of origins) insert(graph, links.filter((link) => originOf(link) === origin));
  }
  swap(OURS, chosen);
}

/** Take the node out of its links. One that links a subgraph's input with its output stays, and is bypassed. */
function takeOut(graph, node) {
  const model = linkOf(graph, node.inputs[0]?.link);
  const links = (node.outputs[0]?.links ?? []).map((id) => linkOf(graph, id)).filter(Boolean);
  if (model && fromOutside(model) && links.some(toOutside)) {
    node.mode = BYPASSED;
    return;
  }
  for (const link of model ? links : []) {
    if (toOutside(link)) {
      const origin = graph.getNodeById(model.origin_id);
      graph.outputNode.slots[link.target_slot].connect(origin.outputs[model.origin_slot], origin);
    } else connect(graph, model, graph.getNodeById(link.target_id), link.target_slot);
  }
  graph.remove(node);
}

function useOne(chosen) {
  for (const graph of graphs()) {
    const own = chosen && new Set(models(graph, chosen).map((link) => graph.getNodeById(link.origin_id)));
    for (const node of graph.nodes.filter((each) => each.type === APPLY && (!own || own.has(each)))) {
      if (chosen) detach(graph, node, chosen);
      else takeOut(graph, node);
    }
  }
  swap(STOCK, chosen);
}

/** Give chosen samplers the model from before the node, which stays for others. */
function detach(graph, node, chosen) {
  const model = linkOf(graph, node.inputs[0]?.link);
  const links = (node.outputs[0]?.links ?? []).map((id) => linkOf(graph, id)).filter(Boolean);
  const own = links.filter((link) => chosen.has(graph.getNodeById(link.target_id)));
  if (own.length === links.length) return takeOut(graph, node);
  for (const link of model ? own : []) connect(graph, model, graph.getNodeById(link.target_id), link.target_slot);
}

/** A node whose pack is missing is saved as it was loaded: it gets the links that it has now. */
function keepLinks() {
  for (const node of graphs().flatMap((graph) => graph.nodes)) {
    node.last_serialization?.inputs?.forEach((slot, i) => (slot.link = node.inputs[i]?.link ?? null));
    node.last_serialization?.outputs?.forEach((slot, i) => (slot.links = [...(node.outputs[i]?.links ?? [])]));
  }
}

let said = null; // the last message: a new one takes its place

function say(severity, detail) {
  if (said) app.extensionManager.toast.remove(said);
  said = { severity, summary: t("use_all.title"), detail, life: 6000 };
  app.extensionManager.toast.add(said);
}

/** Use all GPUs, or one again where all are used. One step of undo. `chosen`: for these nodes only. */
async function change(chosen) {
  const [answer, found] = await Promise.all([api.fetchApi("/context_parallel/status"), foundDevices()]);
  const status = answer.ok ? await answer.json() : {};
  const alone = aloneIn(status);
  if (alone) return say("warn", t(`alone.${alone.case}`, alone));
  const all = usesAll(chosen);
  const count = graphs().flatMap((graph) => models(graph, chosen)).length;
  if (!count && !upscalers(chosen).length) return say("warn", chosen ? t("use_all.none_selected") : t("use_all.none"));
  app.canvas.emitBeforeChange();
  try {
    if (all) useOne(chosen);
    else useAll(chosen);
    keepLinks();
  } finally {
    app.canvas.emitAfterChange();
    app.canvas.setDirty(true, true);
  }
  if (all) return say("info", chosen ? t("use_all.taken_out_selected") : t("use_all.taken_out"));
  forget(); // no event has told of the change yet
  const { on, others } = status.settings ? choice(status.settings, found.devices) : { on: found.devices, others: [] };
  const devices = on.length + others.length;
  if (devices < 2) return say("warn", t("use_all.one_is_on", { all: found.devices.length }));
  if (!count) return say("info", t("use_all.done_upscaling", { devices }));
  return say("info", count === 1 ? t("use_all.done_one", { devices }) : t("use_all.done", { count, devices }));
}

export function toggle() {
  return change();
}

function toggleSelection() {
  return change(selection());
}

export function label() {
  return usesAll() ? t("use_all.take_out") : t("use_all.put_in");
}

/** The entries in the menu of a sampler or upscaler. */
function itemsFor(node) {
  const chosen = new Set([node]);
  if (!models(node.graph, chosen).length && !upscalers(chosen).length) return [];
  const content = usesAll(chosen) ? t("use_all.take_out_selected") : t("use_all.put_in_selected");
  return [null, { content, callback: () => change(chosen) }];
}

app.registerExtension({
  name: "context_parallel.use_all_gpus",
  commands: [
    { id: COMMAND, label: "Use all GPUs in this workflow, or one again", icon: "pi pi-bolt", function: toggle },
    { id: SELECTED, label: "Use all GPUs for the selection, or one again", icon: "pi pi-bolt", function: toggleSelection },
  ],
  keybindings: [{ commandId: COMMAND, combo: { key: "g", alt: true, shift: true } }],
  menuCommands: [{ path: ["Extensions", "Context Parallel"], commands: [COMMAND, SELECTED] }],
  getCanvasMenuItems: () => [null, { content: label(), callback: toggle }],
  getNodeMenuItems: itemsFor,
  getSelectionToolboxCommands: (item) => (item.children || item.subgraph ? [SELECTED] : []),
});
