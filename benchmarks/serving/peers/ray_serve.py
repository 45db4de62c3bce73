"""Ray Serve's HTTP front, one replica: python ray_serve.py PORT   (RAY_SERVE_ENABLE_HA_PROXY=1 puts HAProxy before
it)"""

import sys
import time

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response


@serve.deployment(num_replicas=1, max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0.1})
class Echo:
    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        return Response(body[:32])


ray.init(
    num_cpus=8, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False, configure_logging=False
)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
serve.run(Echo.bind(), route_prefix="/")
print("ready", flush=True)
time.sleep(3600)
