"""What is said on ComfyUI's canvas of a setting that is wrong."""

from playwright.sync_api import expect
from support.graphs import flux_prompt


def test_a_wrong_setting_is_named_where_a_person_looks(browser_server, page):
    """In the message that Run brings, and on the node; nothing is queued."""
    page.evaluate("prompt => app.loadApiJson(prompt, 'test')", flux_prompt(cp={"devices": "cuda:7"}))
    page.get_by_test_id("queue-button").first.click()
    said = page.get_by_test_id("error-overlay-messages")
    expect(said).to_contain_text(
        "CP Config couldn't validate cp_config: which GPUs (devices): Leave it empty to use the first ones. Got 'cuda:7';"
    )
    assert page.evaluate("app.graph.nodes.filter(node => node.has_errors).map(node => node.type)") == ["CPConfig"]
    assert browser_server.get("/prompt")["exec_info"]["queue_remaining"] == 0
    page.get_by_test_id("error-overlay-dismiss").click()
