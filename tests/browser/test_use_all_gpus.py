"""The command that puts Apply Context Parallel in front of every sampler of the open graph, and takes it out again."""

import json
from collections import Counter
from importlib import resources
from itertools import combinations

import pytest
from browser.canvas import TITLE
from playwright.sync_api import expect
from support.graphs import flux_prompt
from support.server import CHECKOUT

COMMAND = "ContextParallel.UseAllGPUs"
APPLY = "ApplyContextParallel"
SAMPLERS = {"KSampler", "KSamplerAdvanced", "SamplerCustom", "BasicGuider", "CFGGuider", "DualCFGGuider", "DualModelGuider"}
# Templates of ComfyUI -> samplers and guiders, and nodes that are put in: one per model that they are given.
TEMPLATES = {
    "default": (1, 1),
    "image_ideogram4_t2i": (1, 2),  # a guider with two models
    "video_wan2_2_14B_flf2v": (2, 2),  # two more are bypassed
    "03_video_wan2_2_14B_i2v_subgraphed": (2, 2),
    "basic_switch_node": (1, 1),  # the model comes from outside of the subgraph
    "templates-6-key-frames": (10, 10),
}


def template(name):
    file = resources.files("comfyui_workflow_templates_json") / "templates" / f"{name}.json"
    if not file.is_file():
        pytest.skip(f"this ComfyUI has no template {name}")
    return json.loads(file.read_text(encoding="utf-8"))


def opened(page, graph):
    page.evaluate("graph => app.loadGraphData(graph)", graph)
    page.wait_for_timeout(300)
    return saved(page)


def built(page, prompt):
    """The graph of a prompt."""
    page.evaluate("prompt => app.loadApiJson(prompt, 'test')", prompt)
    page.wait_for_timeout(300)
    return saved(page)


def saved(page):
    return page.evaluate("() => JSON.parse(JSON.stringify(app.rootGraph.serialize()))")


def run(page, command=COMMAND):
    page.evaluate("command => app.extensionManager.command.execute(command)", command)
    toast = page.locator(".p-toast-message")
    toast.wait_for()
    page.evaluate("() => app.extensionManager.toast.removeAll()")
    toast.wait_for(state="detached")
    return saved(page)


def graphs(graph):
    return [graph, *graph.get("definitions", {}).get("subgraphs", [])]


def links(graph):
    """What is connected with what; each link is a list in the graph itself, an object in a subgraph."""
    found = Counter()
    for each in graphs(graph):
        for link in each["links"]:
            ends = (
                link[1:5]
                if isinstance(link, list)
                else [link[key] for key in ("origin_id", "origin_slot", "target_id", "target_slot")]
            )
            found[(each["id"], *ends)] += 1
    return found


def places(graph):
    return {(each["id"], node["id"]): (node["type"], list(node["pos"])) for each in graphs(graph) for node in each["nodes"]}


def kinds(graph):
    return {key: kind for key, (kind, _) in places(graph).items()}


def overlaps(graph):
    """Pairs of nodes that lie on each other, with their titles; a pixel or two is nobody's concern."""
    found = set()
    for each in graphs(graph):
        boxes = {node["id"]: (*node["pos"], *node["size"]) for node in each["nodes"] if not node["flags"].get("collapsed")}
        for (one, (x, y, width, height)), (other, (left, top, w, h)) in combinations(boxes.items(), 2):
            if min(x + width, left + w) - max(x, left) > 2 and min(y + height, top + h) - max(y, top) + TITLE > 2:
                found.add((each["id"], frozenset((one, other))))
    return found


def sizes(graph):
    return {(each["id"], node["id"]): list(node["size"]) for each in graphs(graph) for node in each["nodes"]}


def added(graph):
    return [(each["id"], node["id"]) for each in graphs(graph) for node in each["nodes"] if node["type"] == APPLY]


VAES = {"VAEDecode": "CPVAEDecode", "VAEEncode": "CPVAEEncode"}


def with_vaes(found):
    """The same nodes with the VAE nodes of this pack."""
    return {key: VAES.get(kind, kind) for key, kind in found.items()}


def origins(graph):
    """Types of the nodes that samplers and guiders get their models from, by sampler."""
    found = {}
    for each in graphs(graph):
        types = {node["id"]: node["type"] for node in each["nodes"]}
        for node in each["nodes"]:
            given = {output["type"] for output in node.get("outputs") or []}
            if node["mode"] or "MODEL" in given or not given & {"LATENT", "GUIDER"} or node["type"] not in SAMPLERS:
                continue
            for slot, into in enumerate(node["inputs"]):
                if into["type"] == "MODEL" and into.get("link") is not None:
                    (origin,) = (key[1] for key in links(graph) if key[0] == each["id"] and key[3:] == (node["id"], slot))
                    found.setdefault((each["id"], node["id"]), []).append(types.get(origin, "outside"))
    return found


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_gets_it_and_gives_it_back(page, name):
    """Every model that reaches a sampler comes through the node; nothing else is connected otherwise, or covered; one undo."""
    samplers, nodes = TEMPLATES[name]
    before = opened(page, template(name))
    assert not added(before)
    assert len(origins(before)) == samplers
    during = run(page)
    assert all(kinds == [APPLY] * len(kinds) for kinds in origins(during).values())
    assert len(added(during)) == nodes
    assert links(during).total() == links(before).total() + nodes
    assert {key: kind for key, kind in kinds(during).items() if key not in added(during)} == with_vaes(kinds(before))
    assert overlaps(during) <= overlaps(before)
    after = run(page)
    assert (links(after), places(after), sizes(after)) == (links(before), places(before), sizes(before))
    assert run(page) != after
    page.evaluate("() => app.extensionManager.workflow.activeWorkflow.changeTracker.undo()")
    page.wait_for_timeout(300)
    assert (links(saved(page)), places(saved(page))) == (links(before), places(before))


@pytest.mark.parametrize("name", sorted(path.stem for path in (CHECKOUT / "workflows").glob("*.json")))
def test_our_own_templates_cover_nothing(page, name):
    """As they are, on one GPU, and on all again."""
    before = opened(page, json.loads((CHECKOUT / "workflows" / f"{name}.json").read_text()))
    assert overlaps(before) == set()
    for _ in range(2):
        assert overlaps(run(page)) == set()


def both(graph):
    """The rectangle of the group of that name."""
    return next(group["bounding"] for group in graph["groups"] if group["title"] == "both")


def test_a_node_below_a_decode_makes_way(page):
    """Also the group around both; what somebody has moved since stays there."""
    opened(page, template("default"))
    page.evaluate(
        """() => {
            const decode = app.graph.nodes.find(node => node.type === "VAEDecode");
            const below = LiteGraph.createNode("EmptyImage"), beside = LiteGraph.createNode("EmptyImage");
            const group = new LiteGraph.LGraphGroup("both");
            decode.pos = [0, 3000];
            for (const each of [below, beside, group]) app.graph.add(each);
            below.pos = [0, 3000 + decode.size[1] + 40];
            beside.pos = [decode.size[0] + 10, 3000];
            [group.pos, group.size] = [[-10, 2930], [decode.size[0] + 20, below.pos[1] + below.size[1] - 2920]];
        }"""
    )
    before = saved(page)
    during = run(page)
    assert overlaps(during) <= overlaps(before)
    bottom = {node["id"]: node["pos"][1] + node["size"][1] for node in during["nodes"]}
    below, beside = (node["id"] for node in during["nodes"] if node["type"] == "EmptyImage")
    (_, top, _, height), (_, _, _, less) = (both(each) for each in (during, before))
    assert bottom[below] < top + height > top + less
    page.evaluate("id => { app.graph.getNodeById(id).pos = [2000, 5000]; }", beside)
    after = run(page)
    assert both(after) == both(before)
    moved = {key: place for key, place in places(after).items() if places(before)[key] != place}
    assert [key[1] for key in moved] == [beside]


def test_one_that_is_there_stays_with_its_settings(page):
    """A sampler that has the node gets no second one; a new one gets the one CP Config that there is."""
    prompt = flux_prompt(cp={"devices": ""})
    prompt["other"] = {
        **prompt["sampler"],
        "inputs": {**prompt["sampler"]["inputs"], "model": prompt["cp_apply"]["inputs"]["model"]},
    }
    before = built(page, prompt)
    during = run(page)
    assert len(added(before)) == 1
    assert len(added(during)) == 2
    new = next(node for node in during["nodes"] if (during["id"], node["id"]) in set(added(during)) - set(added(before)))
    assert all(each["link"] is not None for each in new["inputs"])
    assert not added(run(page))


@pytest.mark.parametrize("mode", [4, 2], ids=["bypassed", "muted"])
def test_one_that_is_off_is_used_again(page, mode):
    built(page, flux_prompt(cp={}))
    page.evaluate("([kind, mode]) => { app.graph.nodes.find(node => node.type === kind).mode = mode; }", [APPLY, mode])
    during = run(page)
    assert [node["mode"] for node in during["nodes"] if node["type"] == APPLY] == [0]


def test_a_pinned_sampler_stays_where_it_is(page):
    page.evaluate("prompt => app.loadApiJson(prompt, 'test')", flux_prompt())
    page.evaluate("() => app.graph.nodes.forEach(node => node.pin(true))")
    page.wait_for_timeout(300)
    before = saved(page)
    during = run(page)
    assert set(map(tuple, origins(during).values())) == {(APPLY,)}
    assert with_vaes(kinds(before)).items() <= kinds(during).items()
    assert [pos for _, pos in places(before).values()] == [places(during)[key][1] for key in places(before)]
    page.evaluate("() => app.graph.nodes.forEach(node => node.pin(true))")
    assert not added(run(page))


OTHER = {"KSampler": "SomebodysSampler", "CheckpointLoaderSimple": "SomebodysLoader"}
"""Node types, and what nodes of other packs are called in their place."""


def test_nodes_of_other_packs_that_are_missing(page):
    """Red nodes, whose types are unknown here, are samplers by their slots, and are saved with the links that they got."""
    for kinds in (["KSampler"], ["CheckpointLoaderSimple"], OTHER):
        graph = template("default")
        for node in graph["nodes"]:
            if node["type"] in kinds:
                node["type"] = OTHER[node["type"]]
        before = opened(page, graph)
        during = run(page)
        assert len(added(during)) == 1
        again = opened(page, during)
        assert links(again) == links(during)
        for node in again["nodes"]:
            ends = {link[4]: link[0] for link in again["links"] if link[3] == node["id"]}
            assert {slot: each["link"] for slot, each in enumerate(node["inputs"]) if each.get("link") is not None} == ends
        assert links(run(page)) == links(before)


def test_a_sampler_of_another_pack(page):
    """Known by its slots: it takes a MODEL and gives a video, whatever it is called."""
    page.evaluate(
        """() => {
            class Other extends LiteGraph.LGraphNode {
                constructor() { super("Other"); this.addInput("net", "MODEL"); this.addOutput("clip", "VIDEO"); }
            }
            LiteGraph.registerNodeType("SomebodysVideo", Other);
            app.graph.clear();
            const [loader, other] = ["UNETLoader", "SomebodysVideo"].map(kind => LiteGraph.createNode(kind));
            app.graph.add(loader);
            app.graph.add(other);
            other.pos = [600, 0];
            loader.connect(0, other, 0);
        }"""
    )
    during = run(page)
    assert len(added(during)) == 1
    assert links(during).total() == 2
    assert not added(run(page))
    page.evaluate("() => { app.graph.clear(); LiteGraph.unregisterNodeType('SomebodysVideo'); }")


MAKE_SUBGRAPH = """kinds => {
    const graph = app.canvas.graph;
    const { subgraph } = graph.convertToSubgraph(new Set(graph.nodes.filter(node => kinds.includes(node.type))));
    return subgraph.id;
}"""


@pytest.mark.parametrize("patch", [None, "ModelSamplingSD3"], ids=["plain", "a patch inside"])
@pytest.mark.parametrize("nested", [False, True], ids=["one", "nested"])
def test_a_subgraph_that_was_made_here(page, patch, nested):
    """Its links name the edge of the subgraph by text. Pressed twice, nothing is left; saved and opened again, it is as it was."""
    built(page, flux_prompt())
    if patch:
        page.evaluate(
            """kind => {
                const node = LiteGraph.createNode(kind), sampler = app.graph.nodes.find(each => each.type === "KSampler");
                app.graph.add(node);
                app.graph.getNodeById(app.graph.getLink(sampler.inputs[0].link).origin_id).connect(0, node, 0);
                node.connect(0, sampler, 0);
            }""",
            patch,
        )
    inside = ["KSampler", *([patch] if patch else [])]
    made = [page.evaluate(MAKE_SUBGRAPH, inside)]
    if nested:
        made.append(page.evaluate(MAKE_SUBGRAPH, made))
    page.wait_for_timeout(300)
    before = saved(page)
    during = run(page)
    assert list(origins(during).values()) == [[APPLY]]
    assert len(added(during)) == 1
    assert links(during).total() == links(before).total() + 1
    again = opened(page, during)
    assert (list(origins(again).values()), links(again).total()) == ([[APPLY]], links(during).total())
    assert not page.evaluate(
        "() => app.rootGraph.nodes.concat(...[...app.rootGraph.subgraphs.values()].map(each => each.nodes))"
        ".filter(node => node.type === 'ApplyContextParallel' && node.inputs[0].link == null).length"
    )
    after = run(page)
    assert not added(after)
    assert links(after).total() == links(before).total()


def test_in_front_of_a_subgraph_that_was_made_here(page):
    """A model that has come through the node outside is shared out inside."""
    page.evaluate("prompt => app.loadApiJson(prompt, 'test')", flux_prompt(cp={}))
    page.evaluate(MAKE_SUBGRAPH, ["KSampler"])
    page.wait_for_timeout(300)
    before = saved(page)
    assert len(added(before)) == 1
    assert not added(run(page))


SELECT = "kinds => app.canvas.selectItems(app.graph.nodes.filter(node => kinds.includes(node.id)))"
FOR_SELECTION = "ContextParallel.UseAllGPUsForSelection"


def test_one_sampler_of_two(page):
    """What is selected alone is changed: a sampler, or all in a group."""
    prompt = flux_prompt()
    prompt["other"] = {**prompt["sampler"], "inputs": {**prompt["sampler"]["inputs"]}}
    before = built(page, prompt)
    first, second = page.evaluate("() => app.graph.nodes.filter(node => node.type === 'KSampler').map(node => node.id)")
    page.evaluate(SELECT, [first])
    during = run(page, FOR_SELECTION)
    assert {key[1]: kinds for key, kinds in origins(during).items()} == {first: [APPLY], second: ["UNETLoader"]}
    run(page)
    assert all(kinds == [APPLY] for kinds in origins(saved(page)).values())
    page.evaluate(SELECT, [second])
    assert origins(run(page, FOR_SELECTION)) == origins(during)
    menu = page.evaluate(
        "id => app.collectNodeMenuItems(app.graph.getNodeById(id)).filter(Boolean).map(each => each.content)", first
    )
    assert menu == ["Use one GPU for this node again"]
    page.evaluate(
        """() => {
            const group = new LiteGraph.LGraphGroup("both");
            app.graph.add(group);
            group.resizeTo(app.graph.nodes);
            app.canvas.selectItems([group]);
        }"""
    )
    assert all(kinds == [APPLY] for kinds in origins(run(page, FOR_SELECTION)).values())
    assert links(run(page, FOR_SELECTION)) == links(before)


def test_what_it_says(page):
    """How many samplers use how many devices; one message at a time; a device that is off is named."""
    built(page, flux_prompt())
    toast = page.locator(".p-toast-message")
    for words in ("1 sampler now uses 2 devices. Press Run.", "This workflow uses one GPU again."):
        page.evaluate("command => app.extensionManager.command.execute(command)", COMMAND)
        expect(toast).to_have_count(1)
        expect(toast).to_contain_text(words)
    page.evaluate("() => app.extensionManager.toast.removeAll()")
    page.evaluate("prompt => app.loadApiJson(prompt, 'test')", flux_prompt(cp={"devices": "cpu:0"}))
    page.evaluate("kind => { app.graph.nodes.find(node => node.type === kind).mode = 4; }", APPLY)
    page.wait_for_timeout(300)
    page.evaluate("command => app.extensionManager.command.execute(command)", COMMAND)
    expect(toast).to_contain_text("1 of 2 devices is on")
    page.evaluate("() => app.extensionManager.toast.removeAll()")


UPSCALED = {
    "model": {"class_type": "UpscaleModelLoader", "inputs": {"model_name": "RealESRGAN_x4plus.safetensors"}},
    "photo": {"class_type": "LoadImage", "inputs": {"image": "example.png"}},
    "larger": {"class_type": "ImageUpscaleWithModel", "inputs": {"upscale_model": ["model", 0], "image": ["photo", 0]}},
    "saved": {"class_type": "SaveImage", "inputs": {"images": ["larger", 0], "filename_prefix": "upscaled"}},
}
STOCK, OURS = "ImageUpscaleWithModel", "CPUpscaleImage"


def upscalers(graph):
    return [node["type"] for each in graphs(graph) for node in each["nodes"] if node["type"] in (STOCK, OURS)]


def test_upscaling_alone(page):
    """There and back, also from the menu of the node; its links stay, but that of a CP Config."""
    before = opened(page, built(page, UPSCALED))
    toast = page.locator(".p-toast-message")
    page.evaluate("command => app.extensionManager.command.execute(command)", COMMAND)
    expect(toast).to_contain_text("Upscaling now uses 2 devices. Press Run.")
    page.evaluate("() => app.extensionManager.toast.removeAll()")
    toast.wait_for(state="detached")
    during = saved(page)
    assert (upscalers(during), links(during)) == ([OURS], links(before))
    assert links(opened(page, during)) == links(before)
    page.evaluate(
        """kind => {
            const config = LiteGraph.createNode("CPConfig");
            app.graph.add(config);
            config.connect(0, app.graph.nodes.find(node => node.type === kind), 2);
        }""",
        OURS,
    )
    after = run(page)
    assert (upscalers(after), links(after)) == ([STOCK], links(before))
    entries = page.evaluate(
        "kind => app.collectNodeMenuItems(app.graph.nodes.find(node => node.type === kind)).filter(Boolean).map(e => e.content)",
        STOCK,
    )
    assert entries == ["Use all GPUs for this node"]


def test_upscaling_after_a_sampler(page):
    """Both together; alone, where it alone is selected or left."""
    prompt = flux_prompt()
    built(page, prompt | UPSCALED)
    during = run(page)
    assert (len(added(during)), upscalers(during)) == (1, [OURS])
    page.evaluate("kind => app.canvas.selectItems(app.graph.nodes.filter(node => node.type === kind))", OURS)
    during = run(page, FOR_SELECTION)
    assert (len(added(during)), upscalers(during)) == (1, [STOCK])
    assert upscalers(run(page)) == [OURS]
    during = run(page)
    assert (len(added(during)), upscalers(during)) == (0, [STOCK])


def test_a_workflow_without_a_sampler_says_so(page):
    page.evaluate("app.graph.clear()")
    page.evaluate("command => app.extensionManager.command.execute(command)", COMMAND)
    expect(page.locator(".p-toast-message")).to_contain_text("This workflow has no sampler with a model")
    page.evaluate("() => app.extensionManager.toast.removeAll()")


def test_button_menu_and_key(page):
    """The panel's first state is a sentence and the button; it says what it would do."""
    opened(page, template("default"))
    page.locator(".context-parallel-tab-button").click()
    use = page.get_by_role("button", name="Use all GPUs in this workflow")
    use.click()
    again = page.get_by_role("button", name="Use one GPU again")
    expect(again).to_be_visible()
    assert added(saved(page))
    page.evaluate("prompt => app.loadApiJson(prompt, 'other')", flux_prompt())  # of which no event tells
    page.mouse.move(900, 500)
    page.mouse.move(200, 500)
    expect(use).to_be_visible()
    opened(page, template("default"))
    use.click()
    expect(again).to_be_visible()
    page.locator("canvas").first.focus()
    page.keyboard.press("Alt+Shift+G")
    expect(use).to_be_visible()
    assert not added(saved(page))
    entries = page.evaluate("() => app.collectCanvasMenuItems(app.canvas).filter(Boolean).map(entry => entry.content)")
    assert "Use all GPUs in this workflow" in entries
