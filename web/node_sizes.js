// New nodes are large enough for their title or for what they show. Their inputs alone make them smaller.

import { app } from "../../scripts/app.js";

const SMALLEST = { ApplyContextParallel: [240, 0], CPReport: [440, 380] }; // pixels

app.registerExtension({
  name: "context_parallel.node_sizes",
  nodeCreated(node) {
    // A workflow that is loaded sets its own sizes after this.
    const smallest = SMALLEST[node.comfyClass];
    if (smallest) node.setSize(smallest.map((least, axis) => Math.max(node.size[axis], least)));
  },
});
