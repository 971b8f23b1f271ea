"""The page in the frame of a notebook, in a real browser."""

import functools
import http.server
import threading

from extensions.view.runs import write_run

from rl4llm.extensions.view.notebook import NotebookPage

INSIDE = "frames[0].document.querySelector"


def test_links_in_the_frame_stay_in_the_frame(browser, tokenizer, tmp_path):
    frame = NotebookPage(write_run(tmp_path / "run", tokenizer), episodes=10)._repr_html_()
    seen = frame.replace('sandbox="', 'sandbox="allow-same-origin ', 1)  # so that this test can look into it
    (tmp_path / "notebook.html").write_text(
        f"<html data-ready=yes><meta charset=utf-8><link rel=icon href=data:,>{seen}"  # asks for no favicon.ico
    )
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.open(f"http://127.0.0.1:{server.server_port}/notebook.html")
        for link, arrived in (("nav a:nth-child(2)", "#count"), ("tbody .dot", ".tokens")):
            browser.until(f"{INSIDE}('{link}')")
            browser.value(f"{INSIDE}('{link}').click()")
            browser.until(f"{INSIDE}('{arrived}')")
        browser.call("Page.navigate", url="about:blank")
        server.shutdown()
