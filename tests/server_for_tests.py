"""A small strict game server that speaks both protocols, one thread per connection, and misbehaves when told to.

Its Actor answers a start with `started <session>`, a tick with the same bytes, and an end with `ended`; a stateless
step with the same bytes.

`server.tell("cut", ...)` lists what to do with the next requests, one word each; then it behaves again:

    ok                 answer
    slow:S             answer after S seconds
    overloaded[:S]     503 (Retry-After: S), not executed;  full: 429, not executed
    refuse:CODE        any other error of the protocol, not executed
    cut                execute, then close without an answer;  half: close in the middle of the answer
    answer_and_close   answer, then close without having said so
    close              answer with `Connection: close`
    wrong_length       claim more bytes than come, then close;  negative: a negative length
    garbage            bytes that are no reply
    drip               answer byte by byte
    continue, chunked, until_close       other forms of a correct HTTP answer
    hold               keep the answer back until after the next one (TCP)
    other_time         answer with another request's time (TCP);  stray: an answer that nobody asked for first (TCP)
"""

import contextlib
import json
import socket
import struct
import threading
import time
from collections import deque

STATUS = {
    "malformed": (400, "Bad Request"),
    "bad_kind": (400, "Bad Request"),
    "bad_token": (401, "Unauthorized"),
    "no_session": (404, "Not Found"),
    "no_path": (404, "Not Found"),
    "bad_method": (405, "Method Not Allowed"),
    "session_exists": (409, "Conflict"),
    "too_large": (413, "Content Too Large"),
    "no_free_slot": (429, "Too Many Requests"),
    "actor_error": (500, "Internal Server Error"),
    "overloaded": (503, "Service Unavailable"),
    "draining": (503, "Service Unavailable"),
    "tick_timeout": (504, "Gateway Timeout"),
}


class Refused(Exception):
    def __init__(self, code, retry_after=None, message=""):
        self.code, self.retry_after = code, retry_after
        self.status, self.reason = STATUS[code]
        self.body = json.dumps({"error": code, "message": message or f"this is {code}"}).encode()


class Server:
    def __init__(self, token=b"", max_body=1 << 20, port=0):
        self.token, self.max_body = token, max_body
        self.orders = deque()
        self.message = ""  # of errors, instead of the usual one
        self.sessions = {}  # name -> ticks
        self.executed = []  # (kind, session, body) in order
        self.keys = []
        self.requests = self.connections = 0
        self.held = []
        self.lock = threading.Lock()
        self.open = set()
        self.listener = socket.create_server(("127.0.0.1", port))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def tell(self, *orders):
        self.orders.extend(orders)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        with contextlib.suppress(OSError):  # stopped already
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept, which would take one more connection
        self.listener.close()
        self.hang_up()

    def hang_up(self):
        """Close every connection."""
        with self.lock:
            connections, self.open = self.open, set()
        for sock in connections:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self):
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self.lock:
                self.connections += 1
                self.open.add(sock)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock):
        try:
            first = sock.recv(1, socket.MSG_PEEK)
            with sock.makefile("rb") as stream:
                serve = self._tcp if first == b"\0" else self._http
                while first and serve(sock, stream):
                    pass
        except (OSError, ValueError):
            pass
        finally:
            sock.close()  # first: who sees that it is not open any more may send at once
            with self.lock:
                self.open.discard(sock)

    # --- the protocols ------------------------------------------------------------------------------------------------

    def _http(self, sock, stream):
        line = stream.readline()
        if not line:
            return False
        headers = {}
        while (header := stream.readline().strip()) != b"":
            name, _, value = header.partition(b":")
            headers[name.lower()] = value.strip()
        size = int(headers.get(b"content-length", 0))
        if size > self.max_body:
            refused = Refused("too_large")
            sock.sendall(_http_reply(refused.status, refused.reason, refused.body, b"Connection: close\r\n"))
            return False
        body = stream.read(size)
        method, path, _ = line.split()
        session = headers.get(b"session", headers.get(b"game_id", b""))
        kind = headers.get(b"step_kind", b"auto")
        order, _, extra = self._next_order().partition(":")
        try:
            if path != b"/step":
                raise Refused("no_path")
            if method != b"POST":
                raise Refused("bad_method")
            status, reason, more = 200, "OK", b""
            body = self._answer(order, extra, session, kind, headers.get(b"key", b""), headers.get(b"token", b""), body)
        except Refused as e:
            status, reason, body = e.status, e.reason, e.body
            more = b"" if e.retry_after is None else b"Retry-After: %d\r\n" % e.retry_after
        if order == "close":
            more = b"Connection: close\r\n"
        reply = _http_reply(status, reason, body, more)
        if order == "wrong_length":
            reply = reply.replace(b"Content-Length: ", b"Content-Length: 9")
        elif order == "negative":
            reply = reply.replace(b"Content-Length: ", b"Content-Length: -")
        elif order == "continue":
            reply = b"HTTP/1.1 100 Continue\r\n\r\n" + reply
        elif order == "chunked":
            half = len(body) // 2
            chunks = b"".join(b"%x;x=y\r\n%b\r\n" % (len(c), c) for c in (body[:half], body[half:]) if c)
            reply = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\nTrailer: 1\r\n\r\n"
        elif order == "until_close":
            reply = b"HTTP/1.0 200 OK\r\n\r\n" + body
        return self._send(sock, order, reply)

    def _tcp(self, sock, stream):
        head = stream.read(48)
        if len(head) < 48:
            return False
        *sizes, stamp = struct.unpack(">6q", head)
        if not all(0 <= size <= 512 for size in sizes[:4]) or sizes[4] < 0:
            sock.sendall(tcp_reply(b"", b"\0BRAYERR" + Refused("malformed").body, stamp))
            return False
        if sizes[4] > self.max_body:
            sock.sendall(tcp_reply(b"", b"\0BRAYERR" + Refused("too_large").body, stamp))
            return False
        session, kind, key, token, body = (stream.read(size) for size in sizes)
        order, _, extra = self._next_order().partition(":")
        try:
            body = self._answer(order, extra, session, kind, key, token, body)
        except Refused as e:
            body = b"\0BRAYERR" + e.body
        reply = tcp_reply(session, body, stamp + (order == "other_time"))
        if order == "wrong_length":
            reply = struct.pack(">q", len(session)) + struct.pack(">q", len(body) + 900) + reply[16:]
        elif order == "negative":
            reply = struct.pack(">q", -1) + reply[8:]
        elif order == "stray":
            reply = tcp_reply(b"somebody", b"else", 12345) + reply
        elif order == "hold":
            self.held.append(reply)
            return True
        if self.held:
            reply += b"".join(self.held)
            self.held.clear()
        return self._send(sock, order, reply)

    def _send(self, sock, order, reply):
        if order == "cut":
            return False
        if order == "half":
            sock.sendall(reply[: len(reply) // 2])
            return False
        if order == "garbage":
            sock.sendall(b"\xffnonsense" * 8)
            return True
        if order == "drip":
            for i in range(len(reply)):
                sock.sendall(reply[i : i + 1])
            return True
        sock.sendall(reply)
        return order not in ("answer_and_close", "close", "wrong_length", "until_close")

    # --- the Actor ----------------------------------------------------------------------------------------------------

    def _next_order(self):
        with self.lock:
            self.requests += 1
            return self.orders.popleft() if self.orders else "ok"

    def _answer(self, order, extra, session, kind, key, token, body):
        if self.token and token != self.token:
            raise Refused("bad_token")
        if order == "overloaded":
            raise Refused("overloaded", int(extra) if extra else None)
        if order == "full":
            raise Refused("no_free_slot")
        if order == "refuse":
            raise Refused(extra, message=self.message)
        if order == "slow":
            time.sleep(float(extra))
        with self.lock:
            return self._execute(session, kind, key, body)

    def _execute(self, session, kind, key, body):
        if kind not in (b"start", b"tick", b"end", b"stop", b"auto", b""):
            raise Refused("bad_kind")
        if kind in (b"auto", b""):
            self.executed.append(("auto", session.decode(), body))
            return body
        if kind == b"start":
            if session in self.sessions:
                raise Refused("session_exists")
            if not session:
                raise Refused("malformed")
            self.sessions[session] = 0
            answer = b"started " + session
        elif session not in self.sessions:
            raise Refused("no_session")
        elif kind == b"tick":
            self.sessions[session] += 1
            answer = body
        else:
            del self.sessions[session]
            kind, answer = b"end", b"ended"
        self.executed.append((kind.decode(), session.decode(), body))
        self.keys.append(key)
        return answer


def _http_reply(status, reason, body, more=b""):
    kind = "application/octet-stream" if status == 200 else "application/json"
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n".encode()
    return head + more + b"\r\n" + body


def tcp_reply(session, body, stamp):
    return struct.pack(">3q", len(session), len(body), stamp) + session + body
