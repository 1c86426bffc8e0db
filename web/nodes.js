// How the nodes look: large enough for what they show, rarely used inputs folded away, devices to choose from.

import { app } from "../../scripts/app.js";
import { chosenIn, foundDevices, labelOf, otherDevice, withOther, write } from "./devices.js";
import { make } from "./panel/elements.js";
import { loadTexts, t } from "./panel/texts.js";

const FOLDED = ["CPConfig", "CPVAEDecode", "CPVAEEncode"]; // nodes with advanced inputs
const SMALLEST = { ApplyContextParallel: [240, 0], CPReport: [440, 380] }; // pixels

app.registerExtension({
  name: "context_parallel.nodes",
  setup: loadTexts,
  nodeCreated(node) {
    // A workflow that is loaded sets its own sizes after this.
    if (FOLDED.includes(node.comfyClass)) fold(node);
    if (node.comfyClass === "CPConfig") offerDevices(node);
    const smallest = SMALLEST[node.comfyClass];
    if (smallest) node.setSize(smallest.map((least, axis) => Math.max(node.size[axis], least)));
  },
});

/** Fold the advanced inputs away, behind a button; not those that differ from their defaults, however the node came by them. */
function fold(node) {
  const onCanvas = !LiteGraph.vueNodesMode; // which shows everything; the frontend's new nodes have a button of their own
  const changed = new Set(); // until the button is pressed: none goes away while it is edited
  for (const widget of node.widgets.filter((widget) => widget.options?.advanced)) {
    const usual = widget.value;
    const isUsual = () => {
      if (widget.value !== usual || node.getSlotFromWidget(widget)?.link != null) changed.add(widget);
      return !changed.has(widget);
    };
    Object.defineProperty(widget.options, "advanced", { get: isUsual, enumerable: true });
    const isHidden = () => !LiteGraph.vueNodesMode && !node.showAdvanced && isUsual();
    // The new nodes read the options; the size that a loaded node gets at least goes by the widget.
    Object.defineProperty(widget, ...(onCanvas ? ["hidden", { get: isHidden }] : ["advanced", { get: isUsual }]));
  }
  if (onCanvas) {
    addButton(node, t("nodes.advanced"), () => {
      node.showAdvanced = !node.showAdvanced;
      changed.clear();
      const height = node.computeSize()[1];
      node.setSize([node.size[0], node.showAdvanced ? Math.max(node.size[1], height) : height]);
    });
  }
  node.setSize([node.size[0], node.computeSize()[1]]);
}

function offerDevices(node) {
  foundDevices().then(({ devices, reason }) => {
    if (devices.length > 1 && !reason) addButton(node, t("nodes.choose"), (event) => choose(node, devices, event));
  });
}

/** A button below the inputs. It has no value, so that saved workflows are those without it. */
function addButton(node, label, pressed) {
  const button = node.addWidget("button", label, null, (value, canvas, _, position, event) => pressed(event));
  button.serialize = false;
  button.options.serialize = false;
  return button;
}

/** A menu of devices, each of which a click takes in or out. `before`: others that it had before a click. */
function choose(node, devices, event, before = []) {
  const now = chosenIn(node, devices);
  const others = [...new Set([...before, ...now.others])];
  const entries = [...devices, ...others.map((name) => otherDevice(name, devices))].map((device) => {
    const on = now.on.includes(device.name) || now.others.includes(device.name);
    return { content: asHtml(`${on ? "☑" : "☐"} ${labelOf(device)}`), device };
  });
  new LiteGraph.ContextMenu(entries, {
    event,
    title: t("nodes.devices"),
    callback({ device }) {
      write(node, withOther(now, device.name, devices));
      node.graph?.setDirtyCanvas(true, true);
      choose(node, devices, event, others); // open again: several can be chosen
    },
  });
}

/** A menu takes HTML, and names come from workflows. */
function asHtml(text) {
  return make("span", "", text).innerHTML;
}
