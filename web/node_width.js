// A new "Apply Context Parallel" is wide enough for its title. Its inputs alone make it narrower.

import { app } from "../../scripts/app.js";

const WIDTH = 240; // pixels

app.registerExtension({
  name: "context_parallel.node_width",
  nodeCreated(node) {
    // A workflow that is loaded sets its own sizes after this.
    if (node.comfyClass === "ApplyContextParallel") node.setSize([Math.max(node.size[0], WIDTH), node.size[1]]);
  },
});
