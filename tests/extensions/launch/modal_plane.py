"""A control plane that stands for Modal's: it notes every request of the real client, and says that all is well.

with control_plane() as plane:
    subprocess.run([..., "-m", "modal", "run", "modal_app.py::train"], env={**os.environ, **plane.environ})
plane.of("FunctionCreate")
"""

import asyncio
import base64
import json
import pickle
import threading
import time
from contextlib import contextmanager

from fault_server import free_port
from grpclib.server import Server
from modal_proto import api_grpc, api_pb2

DONE = api_pb2.GenericResult.GENERIC_STATUS_SUCCESS


class Plane:
    """What was asked, in order."""

    def __init__(self, result):
        self.result = result
        self.port = free_port()
        self.requests = []
        url = f"http://127.0.0.1:{self.port}"
        self.environ = {"MODAL_SERVER_URL": url, "MODAL_TOKEN_ID": "ak-none", "MODAL_TOKEN_SECRET": "as-none"}

    def of(self, name):
        return [request for asked, request in self.requests if asked == name]

    async def answer(self, name, request, reply):
        self.requests.append((name, request))
        fill = getattr(self, f"_{name}", None)
        if fill is not None:
            await fill(request, reply)
        for field, prefix in IDS.get(name, {}).items():
            setattr(reply, field, f"{prefix}-{len(self.requests)}")

    async def _EnvironmentGetOrCreate(self, request, reply):
        reply.metadata.name = "main"
        reply.metadata.settings.image_builder_version = "2025.06"

    async def _AuthTokenGet(self, request, reply):
        words = ({"alg": "none"}, {"exp": int(time.time()) + 3600})
        reply.token = ".".join(
            [*(base64.urlsafe_b64encode(json.dumps(word).encode()).decode() for word in words), ""]
        )

    async def _MountPutFile(self, request, reply):
        reply.exists = True

    async def _ImageGetOrCreate(self, request, reply):
        reply.result.status = DONE

    async def _FunctionPrecreate(self, request, reply):
        reply.function_id = _id(request.function_name)

    async def _FunctionCreate(self, request, reply):
        name = request.function.function_name
        reply.function_id = _id(name)
        reply.function.CopyFrom(request.function)
        reply.function_data.ranked_functions.add().function.CopyFrom(request.function)
        reply.handle_metadata.function_name = name
        if request.function.http_config.port:
            reply.handle_metadata._experimental_flash_urls.append(f"https://{name}.modal.direct")

    async def _FunctionMap(self, request, reply):
        for item in request.pipelined_inputs:
            reply.pipelined_inputs.add(idx=item.idx, input_id="in-1")

    async def _FunctionGetOutputs(self, request, reply):
        if self.result is None:
            await asyncio.sleep(0.2)
            return
        result = api_pb2.GenericResult(status=DONE, data=pickle.dumps(self.result))
        reply.outputs.add(idx=0, input_id="in-1", result=result, data_format=api_pb2.DATA_FORMAT_PICKLE)

    async def _AppGetLogs(self, request, reply):
        await asyncio.sleep(0.1)
        reply.app_done = bool(self.of("AppClientDisconnect"))


def _id(name):
    return f"fu-{name.replace('-', '')}"


IDS = {
    "AppGetOrCreate": {"app_id": "ap"},
    "SandboxCreate": {"sandbox_id": "sb"},
    "SandboxCreateV2": {"sandbox_id": "sb"},
    "AppCreate": {"app_id": "ap", "app_page_url": "https://page"},
    "EnvironmentGetOrCreate": {"environment_id": "en"},
    "VolumeGetOrCreate": {"volume_id": "vo"},
    "SecretGetOrCreate": {"secret_id": "st"},
    "MountGetOrCreate": {"mount_id": "mo"},
    "ImageGetOrCreate": {"image_id": "im"},
    "FunctionMap": {"function_call_id": "fc"},
}


@contextmanager
def control_plane(result=None):
    """Serves in a thread of this process; `result` is what calls return, None if they never do."""
    plane, up, end = Plane(result), threading.Event(), threading.Event()

    def endpoint(name):
        async def ask(self, stream):
            reply = self.__mapping__()[f"/modal.client.ModalClient/{name}"].reply_type()
            await plane.answer(name, await stream.recv_message(), reply)
            await stream.send_message(reply)

        return ask

    base = api_grpc.ModalClientBase
    service = type("Service", (base,), {name: endpoint(name) for name in base.__abstractmethods__})

    async def serve():
        server = Server([service()])
        await server.start("127.0.0.1", plane.port)
        up.set()
        while not end.is_set():
            await asyncio.sleep(0.05)
        server.close()
        await server.wait_closed()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert up.wait(30)
        yield plane
    finally:
        end.set()
        thread.join()
