"""Runs a server that always gives the same answer, to measure the cost of gRPC and HTTP alone.

    python benchmarks/_bare_server.py GRPC_ANSWER_FILE REST_ANSWER_FILE

Prints its two ports.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import grpc
from aiohttp import web


async def main(grpc_answer: bytes, rest_answer: bytes) -> None:
    async def predict(request: bytes, context: Any) -> bytes:
        return grpc_answer

    async def post(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=rest_answer, content_type="application/json")

    server = grpc.aio.server()
    methods = {"Predict": grpc.unary_unary_rpc_method_handler(predict)}
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("tensorflow.serving.PredictionService", methods)]
    )
    grpc_port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    app = web.Application()
    app.router.add_post("/{path:.*}", post)
    runner = web.AppRunner(app, access_log=None, keepalive_timeout=600)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(grpc_port, runner.addresses[0][1], flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(*(Path(each).read_bytes() for each in sys.argv[1:3])))
