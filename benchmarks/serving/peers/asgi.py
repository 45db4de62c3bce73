"""Raw ASGI, for uvicorn: no framework. uvicorn asgi:app"""


async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"32")]})
    await send({"type": "http.response.body", "body": body[:32]})
