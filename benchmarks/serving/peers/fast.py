"""FastAPI, as the original Bray used it: headers as parameters, the body raw. uvicorn fast:app"""

from fastapi import FastAPI, Header, Request, Response

app = FastAPI()


@app.post("/step")
async def step(
    request: Request,
    session: str = Header(default=""),
    step_kind: str = Header(default="", convert_underscores=False),
):
    body = await request.body()
    return Response(content=body[:32], media_type="application/octet-stream")
