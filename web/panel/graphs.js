// The open graph.

import { app } from "../../../scripts/app.js";

/** The open graph and its subgraphs. */
export function graphs() {
  const root = app.rootGraph ?? app.graph.rootGraph ?? app.graph;
  return [root, ...(root.subgraphs?.values() ?? [])];
}
