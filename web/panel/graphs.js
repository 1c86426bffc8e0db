// The open graph.

import { app } from "../../../scripts/app.js";

/** The open graph and its subgraphs. */
export function graphs() {
  const root = app.rootGraph ?? app.graph.rootGraph ?? app.graph;
  return [root, ...(root.subgraphs?.values() ?? [])];
}

/** The title of a node, as the graph shows it; the name of its type, where another graph is open. */
export function nodeTitle({ id, type }) {
  const path = String(id).split(":");
  let graph = graphs()[0];
  for (const step of path.slice(0, -1)) graph = graph?.getNodeById(step)?.subgraph;
  const node = graph?.getNodeById(path.at(-1));
  return node?.type === type ? node.title : (LiteGraph.registered_node_types[type]?.title ?? type);
}
