// How the nodes look: large enough for what they show, rarely used inputs folded away, devices to choose from.

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { loadTexts, t } from "./panel/texts.js";

const SMALLEST = { ApplyContextParallel: [240, 0], CPReport: [440, 380] }; // pixels
const DEVICES = "/context_parallel/devices";

let devices = null; // what the machine has, asked for when the first node that needs it appears

app.registerExtension({
  name: "context_parallel.nodes",
  setup: loadTexts,
  nodeCreated(node) {
    // A workflow that is loaded sets its own sizes after this.
    if (node.comfyClass === "CPConfig") prepareConfig(node);
    const smallest = SMALLEST[node.comfyClass];
    if (smallest) node.setSize(smallest.map((least, axis) => Math.max(node.size[axis], least)));
  },
  loadedGraphNode(node) {
    // What differs from its default is there to be seen.
    if (node.comfyClass !== "CPConfig" || LiteGraph.vueNodesMode) return;
    if (advanced(node).some((widget) => widget.value !== widget.cpDefault)) unfold(node, true);
  },
});

function advanced(node) {
  return node.widgets.filter((widget) => widget.options?.advanced);
}

/** Show the advanced inputs, or fold them away; the node is as high as it has to be. */
function unfold(node, show) {
  node.showAdvanced = show;
  const height = node.computeSize()[1];
  node.setSize([node.size[0], show ? Math.max(node.size[1], height) : height]);
}

function prepareConfig(node) {
  for (const widget of node.widgets) widget.cpDefault = widget.value;
  if (!LiteGraph.vueNodesMode) {
    // The frontend's new nodes do this by themselves; those on the canvas show everything.
    const hidden = { get: () => !LiteGraph.vueNodesMode && !node.showAdvanced };
    for (const widget of advanced(node)) Object.defineProperty(widget, "hidden", hidden);
    addButton(node, t("nodes.advanced"), () => unfold(node, !node.showAdvanced));
    unfold(node, false);
  }
  devices ??= api.fetchApi(DEVICES).then((answer) => (answer.ok ? answer.json() : []));
  devices.then((found) => {
    if (found.length > 1) addButton(node, t("nodes.choose"), (event) => choose(node, found, event));
  });
}

/** A button below the inputs. It has no value, so that saved workflows are those without it. */
function addButton(node, label, pressed) {
  const button = node.addWidget("button", label, null, (value, canvas, _, position, event) => pressed(event));
  button.serialize = false;
  button.options.serialize = false;
  return button;
}

/** A menu of devices, each of which a click takes in or out. All of them, in their order, are an empty text. */
function choose(node, found, event) {
  const widget = node.widgets.find((each) => each.name === "devices");
  const named = widget.value.split(",").map((name) => name.trim());
  const chosen = new Set(found.map((device) => device.name).filter((name) => !widget.value.trim() || named.includes(name)));
  const entries = found.map(({ name, label }) => ({ content: `${chosen.has(name) ? "☑" : "☐"} ${label}`, name }));
  new LiteGraph.ContextMenu(entries, {
    event,
    title: t("nodes.devices"),
    callback({ name }) {
      if (!chosen.delete(name)) chosen.add(name);
      const names = found.map((device) => device.name).filter((each) => chosen.has(each));
      widget.value = names.length === found.length ? "" : names.join(",");
      node.graph?.setDirtyCanvas(true, true);
      choose(node, found, event); // open again: several can be chosen
    },
  });
}
