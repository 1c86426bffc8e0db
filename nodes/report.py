"""CP Report: shows the report of CP Sampler."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui

from ..cp_runtime.comfy.ui.report import shown
from ..cp_runtime.comfy.ui.server import words_now
from .config import ALIASES, CATEGORY


class CPReport(io.ComfyNode):
    """A node that shows a report as a picture: the summary, and bars."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPReport",
            display_name="CP Report",
            category=CATEGORY,
            search_aliases=[*ALIASES, "benchmark", "speed"],
            description="Shows what CP Sampler measured: how fast it was, and how much of its time each rank spent computing, "
            "communicating and waiting for the others. It costs no sampling time.",
            inputs=[io.String.Input("report", force_input=True, tooltip="The report output of CP Sampler. Other text is refused.")],
            outputs=[
                io.String.Output(display_name="text", tooltip="The summary: an overall line and a line for each rank."),
                io.Image.Output(display_name="image", tooltip="The same, with bars. Connect it to Save Image to keep it."),
            ],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> str:
        """Name the language that it is shown in: ComfyUI runs the node again for another one."""
        return words_now().language

    @classmethod
    def execute(cls, report: str) -> io.NodeOutput:
        text, image = shown(report, words_now())
        return io.NodeOutput(text, image, ui=ui.PreviewImage(image, cls=cls))
