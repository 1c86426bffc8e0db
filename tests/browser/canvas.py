"""Where things are on ComfyUI's canvas, which draws its nodes itself."""

from collections.abc import Sequence
from typing import Any

from playwright.sync_api import Page

TITLE = 30  # pixels


def add_node(page: Page, kind: str) -> None:
    """Put a new node on an empty canvas, as a person who took it from the library finds it."""
    page.evaluate("kind => { app.graph.clear(); app.graph.add(LiteGraph.createNode(kind)); }", kind)
    show_node(page, kind)


def show_node(page: Page, kind: str) -> None:
    """Bring a node of a type to the middle, in its real size."""
    page.evaluate(
        """kind => {
            app.canvas.ds.scale = 1;
            app.canvas.centerOnNode(app.graph.nodes.find(node => node.type === kind));
            app.canvas.setDirty(true, true);
        }""",
        kind,
    )
    page.wait_for_timeout(500)


def point_in(page: Page, kind: str, widget: str | None = None) -> tuple[float, float]:
    """A point of the page inside the title of a node, or inside one of its widgets."""
    x, y = page.evaluate(
        """([kind, name]) => {
            const node = app.graph.nodes.find(node => node.type === kind);
            const widget = node.widgets?.find(widget => widget.name === name);
            const [x, y] = [node.pos[0] + 60, node.pos[1] + (widget ? widget.last_y + 10 : -15)];
            const [left, top] = app.canvas.ds.convertOffsetToCanvas([x, y]);
            const canvas = app.canvas.canvas.getBoundingClientRect();
            return [left + canvas.left, top + canvas.top];
        }""",
        [kind, widget],
    )
    return x, y


def box_of(page: Page, kinds: Sequence[str] = (), margin: int = 0) -> dict[str, Any]:
    """The part of the page that nodes of these types (none: all nodes and groups) cover, for a screenshot."""
    left, top, right, bottom = page.evaluate(
        """([kinds, title]) => {
            const nodes = app.graph.nodes.filter(node => !kinds.length || kinds.includes(node.type));
            const boxes = nodes.map(({ pos, size }) => [pos[0], pos[1] - title, pos[0] + size[0], pos[1] + size[1]]);
            if (!kinds.length)
                for (const group of app.graph.groups)
                    boxes.push([...group.pos, group.pos[0] + group.size[0], group.pos[1] + group.size[1]]);
            const low = i => Math.min(...boxes.map(box => box[i])), high = i => Math.max(...boxes.map(box => box[i]));
            const canvas = app.canvas.canvas.getBoundingClientRect();
            const place = (x, y) => {
                const [left, top] = app.canvas.ds.convertOffsetToCanvas([x, y]);
                return [left + canvas.left, top + canvas.top];
            };
            return [...place(low(0), low(1)), ...place(high(2), high(3))];
        }""",
        [list(kinds), TITLE],
    )
    size = page.viewport_size or {"width": right, "height": bottom}
    left, top = max(0, left - margin), max(0, top - margin)
    return {
        "x": left,
        "y": top,
        "width": min(size["width"], right + margin) - left,
        "height": min(size["height"], bottom + margin) - top,
    }
