// "Use all GPUs in this workflow": puts Apply Context Parallel in front of every sampler and guider of the open graph and its
// subgraphs, and takes it out again. In the panel, the menu of the canvas, and as a command with a key.

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { t } from "./panel/texts.js";

const APPLY = "ApplyContextParallel";
const CONFIG = "CPConfig";
const COMMAND = "ContextParallel.UseAllGPUs";
const SAMPLED = ["LATENT", "GUIDER", "IMAGE", "VIDEO", "AUDIO"]; // what a node gives that samples; one for MODEL to MODEL or SIGMAS does not
const BYPASSED = 4; // mode of a node
const INPUT = -10; // what ComfyUI calls the origin of a link that comes from outside of a subgraph
const OUTPUT = -20;
const GAP = 30; // pixels between nodes
const TITLE = 30; // height of a title, which stands above a node's position

/** The open graph and its subgraphs. */
export function graphs() {
  const root = app.rootGraph ?? app.graph.rootGraph ?? app.graph;
  return [root, ...(root.subgraphs?.values() ?? [])];
}

function linkOf(graph, id) {
  return id === null || id === undefined ? null : graph.getLink(id);
}

function samples(node) {
  const given = node.outputs?.map((output) => output.type) ?? [];
  return node.mode === 0 && !node.subgraph && !given.includes("MODEL") && given.some((type) => SAMPLED.includes(type));
}

/** The links that bring samplers and guiders of a graph their models. */
function models(graph) {
  return graph.nodes.filter(samples).flatMap((node) => {
    const inputs = node.inputs?.filter((input) => input.type === "MODEL") ?? [];
    return inputs.map((input) => linkOf(graph, input.link)).filter(Boolean);
  });
}

/** Whether the model of a link has come through Apply Context Parallel. */
function applied(graph, link, seen = new Set()) {
  if (!link || seen.has(link)) return false;
  seen.add(link);
  if (link.origin_id === INPUT) {
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

function missing() {
  return graphs().map((graph) => [graph, models(graph).filter((link) => !applied(graph, link))]);
}

/** Whether there is a sampler, and the model of each is shared out. */
export function usesAll() {
  return graphs().some((graph) => models(graph).length > 0) && missing().every(([, links]) => links.length === 0);
}

/** Connect what a link comes from with an input, or a slot of the subgraph's outputs; lines keep their bends. */
function connect(graph, link, node, slot) {
  if (link.origin_id === INPUT) return graph.inputNode.slots[link.origin_slot].connect(node.inputs[slot], node, link.parentId);
  return graph.getNodeById(link.origin_id).connect(link.origin_slot, node, slot, link.parentId);
}

function overlaps(graph, [x, y], [width, height]) {
  return graph.nodes.some(({ pos, size }) => {
    const apart = [pos[0] - x - width, x - pos[0] - size[0], pos[1] - TITLE - y - height, y - TITLE - pos[1] - size[1]];
    return apart.every((distance) => distance < GAP / 2);
  });
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

function useAll() {
  for (const graph of graphs()) {
    for (const node of graph.nodes) if (node.type === APPLY && node.mode === BYPASSED) node.mode = 0;
  }
  for (const [graph, links] of missing()) {
    const origins = new Set(links.map(originOf));
    for (const origin of origins) insert(graph, links.filter((link) => originOf(link) === origin));
  }
}

/** Take the node out of its links. One that links a subgraph's input with its output stays, and is bypassed. */
function takeOut(graph, node) {
  const model = linkOf(graph, node.inputs[0]?.link);
  const links = (node.outputs[0]?.links ?? []).map((id) => linkOf(graph, id)).filter(Boolean);
  if (model?.origin_id === INPUT && links.some((link) => link.target_id === OUTPUT)) {
    node.mode = BYPASSED;
    return;
  }
  for (const link of model ? links : []) {
    if (link.target_id === OUTPUT) {
      const origin = graph.getNodeById(model.origin_id);
      graph.outputNode.slots[link.target_slot].connect(origin.outputs[model.origin_slot], origin);
    } else connect(graph, model, graph.getNodeById(link.target_id), link.target_slot);
  }
  graph.remove(node);
}

function useOne() {
  for (const graph of graphs()) {
    for (const node of graph.nodes.filter((each) => each.type === APPLY)) takeOut(graph, node);
  }
}

/** A node whose pack is missing is saved as it was loaded: it gets the links that it has now. */
function keepLinks() {
  for (const node of graphs().flatMap((graph) => graph.nodes)) {
    node.last_serialization?.inputs?.forEach((slot, i) => (slot.link = node.inputs[i]?.link ?? null));
    node.last_serialization?.outputs?.forEach((slot, i) => (slot.links = [...(node.outputs[i]?.links ?? [])]));
  }
}

function say(severity, detail) {
  app.extensionManager.toast.add({ severity, summary: t("use_all.title"), detail, life: 6000 });
}

/** Use all GPUs, or one again where all are used. One step of undo. */
export async function toggle() {
  const answer = await api.fetchApi("/context_parallel/status");
  const alone = answer.ok ? (await answer.json()).alone : null;
  if (alone) return say("warn", t(`alone.${alone.case}`, alone));
  const all = usesAll();
  const count = graphs().flatMap(models).length;
  if (!count) return say("warn", t("use_all.none"));
  app.canvas.emitBeforeChange();
  try {
    if (all) useOne();
    else useAll();
    keepLinks();
  } finally {
    app.canvas.emitAfterChange();
    app.canvas.setDirty(true, true);
  }
  return say("info", all ? t("use_all.taken_out") : t("use_all.done", { count }));
}

export function label() {
  return usesAll() ? t("use_all.take_out") : t("use_all.put_in");
}

app.registerExtension({
  name: "context_parallel.use_all_gpus",
  commands: [{ id: COMMAND, label: "Use all GPUs in this workflow, or one again", icon: "pi pi-bolt", function: toggle }],
  keybindings: [{ commandId: COMMAND, combo: { key: "g", alt: true, shift: true } }],
  menuCommands: [{ path: ["Extensions", "Context Parallel"], commands: [COMMAND] }],
  getCanvasMenuItems: () => [null, { content: label(), callback: toggle }],
});
