"""A headless Chromium, driven over its DevTools protocol through a pair of pipes: no port, no driver, no
package.

Page.call ──► fd 3 of Chromium ──► messages, each ended by a zero byte
_read     ◄── fd 4 of Chromium ◄── answers (by number) and events (kept in `events`, in order)
"""

import base64
import itertools
import json
import os
import shutil
import subprocess
from contextlib import asynccontextmanager

import trio

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CALL_TIMEOUT_S, WAIT_TIMEOUT_S = 60.0, 20.0
KEY_CODES = {"Escape": 27, "Tab": 9, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}  # of Windows
ARGUMENTS = """
    --headless=new --remote-debugging-pipe --no-first-run
    --no-default-browser-check --disable-gpu --disable-dev-shm-usage
    --disable-background-networking --disable-component-update --disable-sync
    --disable-default-apps --disable-extensions --hide-scrollbars
    --force-color-profile=srgb --mute-audio"""


class DevToolsError(Exception):
    """Chromium refused a call, or a script in the page raised."""


class Page:
    """A tab. Made by open_page."""

    def __init__(self, to_browser):
        self._to_browser, self._lock = to_browser, trio.Lock()
        self._numbers, self._answers = itertools.count(), {}
        self._session = {}  # what a call of the tab says besides
        self.events = []  # everything that the page said, in order

    async def call(self, method, **parameters):
        """The result of a DevTools call. Raises DevToolsError if it is refused, TooSlowError without an
        answer in a minute.
        """
        number, event, answer = next(self._numbers), trio.Event(), {}
        self._answers[number] = event, answer
        message = {"id": number, "method": method, "params": parameters, **self._session}
        with trio.fail_after(CALL_TIMEOUT_S):
            async with self._lock:
                await self._to_browser.send_all(json.dumps(message).encode() + b"\0")
            await event.wait()
        if "error" in answer:
            raise DevToolsError(f"{method}: {answer['error']}")
        return answer["result"]

    async def read(self, from_browser):
        """Takes what the browser says until it ends: answers by their number, events in order."""
        rest = b""
        async for chunk in from_browser:
            *whole, rest = (rest + chunk).split(b"\0")
            for message in map(json.loads, whole):
                if "id" in message:
                    event, answer = self._answers.pop(message["id"])
                    answer.update(message)
                    event.set()
                else:
                    self.events.append(message)

    async def attach(self):
        """Opens the tab and lets it tell of its console, exceptions and requests."""
        target = await self.call("Target.createTarget", url="about:blank")
        answer = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = {"sessionId": answer["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def resize(self, width, height):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)

    async def prefer(self, scheme):
        """The system's theme, `light` or `dark`."""
        await self.call(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
        )

    async def open(self, url):
        """Goes to an address and waits until the page says that it is ready."""
        await self.call("Page.navigate", url=url)
        await self.wait("document.documentElement.dataset.ready === 'true'")

    async def evaluate(self, expression):
        """The value of a JavaScript expression, promises awaited. Raises DevToolsError if it raises."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise DevToolsError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    async def wait(self, expression):
        """Until the expression is true of the page. Raises TooSlowError."""
        condition = f"(() => {{ try {{ return Boolean({expression}); }} catch {{ return false; }} }})()"
        # the page's own clock; a page without a window draws no frames
        frame = "new Promise((done) => setTimeout(done, 20))"
        with trio.fail_after(WAIT_TIMEOUT_S):
            while not await self.evaluate(condition):
                await self.evaluate(frame)

    async def press(self, key):
        """A key down and up, with its text if it is a letter or a sign."""
        code = KEY_CODES.get(key, ord(key.upper()[0]))
        for kind, more in (("keyDown", {"text": key} if len(key) == 1 else {}), ("keyUp", {})):
            more |= {"type": kind, "key": key, "windowsVirtualKeyCode": code}
            await self.call("Input.dispatchKeyEvent", **more)

    async def type(self, text):
        """Text as from a keyboard, into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def screenshot(self, path):
        """What the window shows, as a PNG."""
        image = await self.call("Page.captureScreenshot", format="png")
        await trio.Path(path).write_bytes(base64.b64decode(image["data"]))

    def said(self, *methods):
        """What the events of these kinds say, in order."""
        return [event["params"] for event in self.events if event["method"] in methods]


# what the page wrote to the console, exceptions, and what the browser itself logged
COMPLAINTS = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")


@asynccontextmanager
async def open_page(profile):
    """A tab of a browser of its own, which keeps its profile in `profile` and ends with the block.

    Raises DevToolsError where there is no Chromium.
    """
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        raise DevToolsError(f"none of {', '.join(NAMES)} is installed; apt-get install chromium")
    commands, to_browser = os.pipe()
    from_browser, answers = os.pipe()
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # root cannot use it
    # The protocol is on descriptors 3 and 4 of the browser, whatever numbers the pipes have here.
    redirect = ["bash", "-c", f'exec "$@" 3<&{commands} 4>&{answers}', "bash"]
    silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    process = await trio.lowlevel.open_process(
        [*redirect, program, *ARGUMENTS.split(), *sandbox, f"--user-data-dir={profile}"],
        pass_fds=(commands, answers),
        start_new_session=True,
        **silent,
    )
    os.close(commands)
    os.close(answers)
    try:
        async with (
            trio.lowlevel.FdStream(to_browser) as send,
            trio.lowlevel.FdStream(from_browser) as receive,
            trio.open_nursery() as nursery,
        ):
            page = Page(send)
            nursery.start_soon(page.read, receive)
            await page.attach()
            await page.resize(1280, 900)
            yield page
            nursery.cancel_scope.cancel()
    finally:  # the browser ends when its pipes close; what has not ended soon is killed
        with trio.move_on_after(10, shield=True):
            await process.wait()
        if process.returncode is None:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()
