// Bray game client for Unity (2021 and later) and .NET: one file, no dependencies, HTTP and framed TCP.
// The protocol: docs/protocol.md.
//
//     using (var client = new Bray.Client("127.0.0.1", 8000))
//     {
//         client.Start();
//         byte[] reply = client.Tick(bytes);          // or: await client.TickAsync(bytes)
//         client.End();
//     }
//
// Each call takes at most `timeout` seconds, retries included. It returns the Actor's bytes or throws:
//
//     ClientException              the server answered with an error; Status, Code and Message say which
//       SessionLostException       404: the session is unknown, ended, expired or its worker died: Start() again
//       ConnectFailedException     the request did not leave whole: nothing was executed
//       ConnectionLostException    the request left and no reply came: it may or may not have been executed
//
// What was not executed is sent again up to `retries` times with growing pauses (no connection, 503, and 429 at start
// or step). A request that was sent but not answered is sent again only with idempotent: true.
//
// A client plays one session at a time; its calls run one after the other. In Unity use the async methods on the main
// thread: the blocking ones would stop the frame. (WebGL has no sockets; use UnityWebRequest there.)

using System;
using System.Collections.Generic;
using System.Globalization;
using System.IO;
using System.Net.Security;
using System.Net.Sockets;
using System.Security.Authentication;
using System.Text;
using System.Threading;
using System.Threading.Tasks;

namespace Bray
{
    /// <summary>An answer that is not 200. Status is 0 where no server answered; Code is then connect_failed,
    /// connection_lost, timeout, bad_reply or not_started.</summary>
    public class ClientException : Exception
    {
        public readonly int Status;
        public readonly string Code;

        /// <summary>Seconds the server asks to wait; below 0 where it does not say.</summary>
        public readonly double RetryAfter;

        public ClientException(int status, string code, string message, double retryAfter = -1) : base(message)
        {
            Status = status;
            Code = code;
            RetryAfter = retryAfter;
        }

        public override string ToString()
        {
            return (Status != 0 ? Status + " " : "") + Code + ": " + Message;
        }
    }

    /// <summary>The server does not know this session (any more): Start a new one.</summary>
    public class SessionLostException : ClientException
    {
        public SessionLostException(int status, string code, string message) : base(status, code, message) { }
    }

    /// <summary>The request could not be sent whole, so nothing was executed.</summary>
    public class ConnectFailedException : ClientException
    {
        public ConnectFailedException(string code, string message) : base(0, code, message) { }
    }

    /// <summary>The request was sent and no reply came. It may or may not have been executed.</summary>
    public class ConnectionLostException : ClientException
    {
        public ConnectionLostException(string code, string message) : base(0, code, message) { }
    }

    /// <summary>Plays one game against a Bray service.</summary>
    public sealed class Client : IDisposable
    {
        readonly string host, token, key, fixedSession;
        readonly int port, retries;
        readonly double timeout;
        readonly bool tcp, tls;
        readonly RemoteCertificateValidationCallback trust;
        readonly Random random = new Random();
        readonly SemaphoreSlim turn = new SemaphoreSlim(1, 1);
        readonly byte[] piece = new byte[65536];
        TcpClient connection;
        Stream stream; // of the connection, with TLS around it where that is wanted
        ReplyReader reader;
        string secret = ""; // of the session, where the service gives one
        long time;

        /// <param name="timeout">seconds for each call, waiting and retries included</param>
        /// <param name="tcp">framed TCP instead of HTTP</param>
        /// <param name="session">a fixed name; without it every Start makes a new one</param>
        /// <param name="token">checked by services that have one</param>
        /// <param name="key">reaches the Actor unread</param>
        /// <param name="tls">connect with TLS</param>
        /// <param name="trust">decides about the service's certificate; without it the system does</param>
        public Client(string host = "127.0.0.1", int port = 8000, double timeout = 60, bool tcp = false,
            string session = null, string token = null, string key = null, int retries = 5, bool tls = false,
            RemoteCertificateValidationCallback trust = null)
        {
            if (!(timeout > 0)) throw new ArgumentException("timeout: expected seconds > 0");
            if (retries < 0) throw new ArgumentException("retries: expected 0 or more");
            this.host = host;
            this.port = port;
            this.timeout = timeout;
            this.tcp = tcp;
            this.tls = tls;
            this.trust = trust;
            this.retries = retries;
            fixedSession = Checked("session", session);
            this.token = Checked("token", token);
            this.key = Checked("key", key);
            Session = fixedSession;
        }

        /// <summary>The name of the session; empty before the first Start.</summary>
        public string Session { get; private set; }

        /// <summary>Start a session. Its name is `game`, or `game-agent-name` with an agent; a new unique game where
        /// none is given.</summary>
        public byte[] Start(string game = "", string agent = "", byte[] data = null)
        {
            Name(game, agent);
            return Request("start", data, false, true).GetAwaiter().GetResult();
        }

        public Task<byte[]> StartAsync(string game = "", string agent = "", byte[] data = null)
        {
            Name(game, agent);
            return Request("start", data, false, false);
        }

        /// <summary>One decision: send the state of the game, get the Actor's answer.</summary>
        public byte[] Tick(byte[] data, bool idempotent = false)
        {
            NeedSession();
            return Request("tick", data, idempotent, true).GetAwaiter().GetResult();
        }

        public Task<byte[]> TickAsync(byte[] data, bool idempotent = false)
        {
            NeedSession();
            return Request("tick", data, idempotent, false);
        }

        /// <summary>End the session; returns the Actor's last answer.</summary>
        public byte[] End(byte[] data = null)
        {
            NeedSession();
            return Request("end", data, false, true).GetAwaiter().GetResult();
        }

        public Task<byte[]> EndAsync(byte[] data = null)
        {
            NeedSession();
            return Request("end", data, false, false);
        }

        /// <summary>A decision without a session.</summary>
        public byte[] Step(byte[] data, bool idempotent = false)
        {
            return Request("auto", data, idempotent, true).GetAwaiter().GetResult();
        }

        public Task<byte[]> StepAsync(byte[] data, bool idempotent = false)
        {
            return Request("auto", data, idempotent, false);
        }

        /// <summary>Close the connection. The session lives on until it is ended or expires.</summary>
        public void Dispose()
        {
            if (stream != null) stream.Dispose();
            if (connection != null) connection.Close();
            connection = null;
            stream = null;
        }

        void Name(string game, string agent)
        {
            secret = "";
            if (string.IsNullOrEmpty(game) && string.IsNullOrEmpty(agent) && fixedSession != "")
            {
                Session = fixedSession;
                return;
            }
            string name = string.IsNullOrEmpty(game) ? Guid.NewGuid().ToString() : game;
            Session = Checked("session", string.IsNullOrEmpty(agent) ? name : name + "-agent-" + agent);
        }

        void NeedSession()
        {
            if (Session == "")
                throw new ClientException(0, "not_started", "expected a session, there is none: call Start() first");
        }

        static string Checked(string name, string value)
        {
            value = value ?? "";
            bool bad = value != value.Trim();
            foreach (char c in value) bad = bad || c < 0x20 || c == 0x7f;
            if (bad)
                throw new ArgumentException(name + ": expected text without control characters or blanks around it");
            return value;
        }

        string Where
        {
            get { return "session '" + Session + "' at " + host + ":" + port; }
        }

        // --- sending again -----------------------------------------------------------------------------------------

        // One method for both kinds of call: with `blocking` nothing in here ever waits for another thread's task, so
        // the task it returns is complete.
        async Task<byte[]> Request(string kind, byte[] data, bool idempotent, bool blocking)
        {
            string session = kind == "auto" ? "" : Session;
            data = data ?? new byte[0];
            DateTime deadline = DateTime.UtcNow.AddSeconds(timeout);
            double pause = 0.05;
            if (blocking) turn.Wait();
            else await turn.WaitAsync().ConfigureAwait(false);
            try
            {
                for (int left = retries; ; left--)
                {
                    // The upper half is random, so that a thousand games do not come back in the same millisecond.
                    double wait = pause * (0.5 + 0.5 * random.NextDouble());
                    pause = Math.Min(2 * pause, 2.0);
                    try
                    {
                        return await Exchange(kind, session, data, deadline, blocking).ConfigureAwait(false);
                    }
                    catch (ClientException error)
                    {
                        if (error.RetryAfter > 0) wait += error.RetryAfter;
                        bool late = DateTime.UtcNow.AddSeconds(wait) >= deadline;
                        if (left <= 0 || !Harmless(error, kind, idempotent) || late) throw;
                    }
                    if (blocking) Thread.Sleep(TimeSpan.FromSeconds(wait));
                    else await Task.Delay(TimeSpan.FromSeconds(wait)).ConfigureAwait(false);
                }
            }
            finally
            {
                turn.Release();
            }
        }

        // Whether sending again cannot execute the request twice (or may).
        static bool Harmless(ClientException error, string kind, bool idempotent)
        {
            if (error.Code == "bad_certificate") return false;
            if (error.Status == 503 || error is ConnectFailedException) return true;
            if (error.Status == 429) return kind == "start" || kind == "auto";
            return idempotent && error is ConnectionLostException;
        }

        // --- one request and its reply -----------------------------------------------------------------------------

        async Task<byte[]> Exchange(string kind, string session, byte[] data, DateTime deadline, bool blocking)
        {
            time++;
            byte[] message = tcp ? TcpMessage(session, kind, data) : HttpMessage(session, kind, data);
            bool sent = false, whole = false;
            Reply reply;
            // Awaited reads know no timeout on the older runtimes; closing the connection ends them on every one.
            CancellationTokenSource alarm = blocking ? null : new CancellationTokenSource();
            try
            {
                if (connection != null && connection.Client.Poll(0, SelectMode.SelectRead))
                    Dispose(); // the server closed it while it was idle
                if (connection == null) await Connect(deadline, blocking).ConfigureAwait(false);
                TcpClient mine = connection;
                if (!blocking) alarm.Token.Register(mine.Close);
                Limit(mine, alarm, Left(deadline));
                Stream stream = this.stream;
                try
                {
                    if (blocking) stream.Write(message, 0, message.Length);
                    else await stream.WriteAsync(message, 0, message.Length).ConfigureAwait(false);
                    sent = true;
                }
                catch (IOException)
                {
                    // A server that refuses a large body answers and closes before all of it was sent.
                    if (DateTime.UtcNow >= deadline) throw;
                    Limit(mine, alarm, Math.Min(Left(deadline), 1000));
                }
                do
                {
                    int n = blocking
                        ? stream.Read(piece, 0, piece.Length)
                        : await stream.ReadAsync(piece, 0, piece.Length).ConfigureAwait(false);
                    reply = n > 0 ? reader.Feed(piece, n) : reader.End();
                    if (n == 0 && reply == null) throw new IOException("the server closed the connection");
                    if (blocking && reply == null) Limit(mine, alarm, Left(deadline));
                }
                while (reply == null);
                whole = reply.Keep;
            }
            catch (Exception error)
            {
                if (!(error is IOException || error is SocketException || error is ObjectDisposedException)) throw;
                bool late = DateTime.UtcNow >= deadline || (alarm != null && alarm.IsCancellationRequested);
                throw Lost(sent, error.Message, late);
            }
            finally
            {
                if (alarm != null) alarm.Dispose();
                if (!whole) Dispose(); // a late reply would pass for the next request's
            }
            ClientException refusal = reply.Error(tcp, Where);
            bool another = tcp && (reply.Session != session || reply.Time != time);
            if (another && !(refusal != null && reply.Session == ""))
            {
                Dispose();
                throw new ConnectionLostException("bad_reply",
                    "expected the reply to request " + time + ", got another's");
            }
            if (refusal != null) throw refusal;
            if (kind == "start") secret = reply.Secret;
            return reply.Body;
        }

        static void Limit(TcpClient connection, CancellationTokenSource alarm, int milliseconds)
        {
            if (alarm == null) connection.ReceiveTimeout = connection.SendTimeout = milliseconds;
            else alarm.CancelAfter(milliseconds);
        }

        static int Left(DateTime deadline)
        {
            return (int)Math.Max(1, Math.Min(int.MaxValue, (deadline - DateTime.UtcNow).TotalMilliseconds));
        }

        async Task Connect(DateTime deadline, bool blocking)
        {
            var opened = new TcpClient();
            opened.NoDelay = true;
            Task connecting = opened.ConnectAsync(host, port);
            bool failed = false;
            if (blocking)
            {
                try
                {
                    connecting.Wait(Left(deadline));
                }
                catch (AggregateException)
                {
                    failed = true;
                }
            }
            else
            {
                var delay = new CancellationTokenSource();
                await Task.WhenAny(connecting, Task.Delay(Left(deadline), delay.Token)).ConfigureAwait(false);
                delay.Cancel();
                failed = connecting.IsFaulted;
            }
            if (connecting.IsCompleted && !failed)
            {
                connection = opened;
                stream = opened.GetStream();
                reader = tcp ? (ReplyReader)new TcpReader() : new HttpReader();
                if (tls) await Handshake(deadline, blocking).ConfigureAwait(false);
                return;
            }
            opened.Close();
            if (failed) throw Lost(false, connecting.Exception.GetBaseException().Message, false);
            Forget(connecting);
            throw Lost(false, "", true);
        }

        async Task Handshake(DateTime deadline, bool blocking)
        {
            var secured = trust == null ? new SslStream(stream, false) : new SslStream(stream, false, trust);
            stream = secured;
            connection.ReceiveTimeout = connection.SendTimeout = Left(deadline);
            TcpClient mine = connection;
            using (var alarm = new CancellationTokenSource(Left(deadline)))
            {
                alarm.Token.Register(mine.Close);
                try
                {
                    if (blocking) secured.AuthenticateAsClient(host);
                    else await secured.AuthenticateAsClientAsync(host).ConfigureAwait(false);
                }
                catch (AuthenticationException error)
                {
                    throw new ConnectFailedException("bad_certificate",
                        "the service's certificate is not trusted: " + error.Message + " (" + Where + ")");
                }
            }
        }

        // Its error is nobody's business now, but an error that nobody looks at may end the program.
        static void Forget(Task task)
        {
            task.ContinueWith(t => t.Exception);
        }

        ClientException Lost(bool sent, string reason, bool timedOut)
        {
            if (timedOut) reason = "no reply within the timeout";
            if (sent)
                return new ConnectionLostException(timedOut ? "timeout" : "connection_lost",
                    reason + " (" + Where + "). The request was sent; it may have been executed");
            return new ConnectFailedException(timedOut ? "timeout" : "connect_failed",
                reason + " (" + Where + "). Nothing was executed. Is the service running there?");
        }

        byte[] HttpMessage(string session, string kind, byte[] data)
        {
            var head = new StringBuilder("POST /step HTTP/1.1\r\nHost: ");
            head.Append(host.Contains(":") ? "[" + host + "]" : host).Append(':').Append(port);
            head.Append("\r\nstep_kind: ").Append(kind);
            if (session != "") head.Append("\r\nsession: ").Append(session);
            if (key != "") head.Append("\r\nkey: ").Append(key);
            if (token != "") head.Append("\r\ntoken: ").Append(token);
            if (secret != "" && kind != "auto") head.Append("\r\nsession_secret: ").Append(secret);
            head.Append("\r\nContent-Length: ").Append(data.Length).Append("\r\n\r\n");
            return Joined(Encoding.UTF8.GetBytes(head.ToString()), data);
        }

        byte[] TcpMessage(string session, string kind, byte[] data)
        {
            byte[][] parts =
            {
                Encoding.UTF8.GetBytes(session), Encoding.UTF8.GetBytes(kind), Encoding.UTF8.GetBytes(key),
                Encoding.UTF8.GetBytes(token), data,
            };
            var head = new byte[48];
            for (int i = 0; i < 5; i++) PutInt64(head, 8 * i, parts[i].Length);
            PutInt64(head, 40, time);
            return Joined(head, parts);
        }

        static byte[] Joined(byte[] head, params byte[][] parts)
        {
            int size = head.Length, at = head.Length;
            foreach (byte[] part in parts) size += part.Length;
            var all = new byte[size];
            Buffer.BlockCopy(head, 0, all, 0, head.Length);
            foreach (byte[] part in parts)
            {
                Buffer.BlockCopy(part, 0, all, at, part.Length);
                at += part.Length;
            }
            return all;
        }

        static void PutInt64(byte[] into, int at, long value)
        {
            for (int i = 7; i >= 0; i--)
            {
                into[at + i] = (byte)value;
                value >>= 8;
            }
        }
    }

    // --- replies, from whatever pieces arrive ------------------------------------------------------------------------

    sealed class Reply
    {
        static readonly byte[] Mark = Encoding.ASCII.GetBytes("\0BRAYERR");

        static readonly Dictionary<string, int> Statuses = new Dictionary<string, int>
        {
            { "malformed", 400 }, { "bad_kind", 400 }, { "bad_token", 401 }, { "no_session", 404 }, { "no_path", 404 },
            { "bad_secret", 403 }, { "too_many_connections", 429 }, { "too_many_requests", 429 },
            { "too_many_sessions", 429 },
            { "bad_method", 405 }, { "slow_request", 408 }, { "session_exists", 409 }, { "too_large", 413 },
            { "no_free_slot", 429 }, { "header_too_large", 431 }, { "actor_error", 500 }, { "overloaded", 503 },
            { "draining", 503 }, { "tick_timeout", 504 },
        };

        public byte[] Body;
        public int Status; // of HTTP; 0 over TCP
        public double RetryAfter = -1;
        public bool Keep = true;
        public string Session = ""; // what TCP echoes
        public string Secret = ""; // what further requests of the session must carry
        public long Time;

        /// The error that a reply carries, or null.
        public ClientException Error(bool tcp, string where)
        {
            int skip = 0;
            if (tcp)
            {
                if (Body.Length < Mark.Length) return null;
                for (; skip < Mark.Length; skip++)
                    if (Body[skip] != Mark[skip]) return null;
            }
            else if (Status >= 200 && Status < 300)
            {
                return null;
            }
            string json = Encoding.UTF8.GetString(Body, skip, Body.Length - skip);
            string code = JsonString(json, "error"), message = JsonString(json, "message");
            int status = Status;
            if (tcp && !Statuses.TryGetValue(code, out status)) status = 500;
            if (code == "") // a proxy's page
            {
                code = "http_" + status;
                message = json.Substring(0, Math.Min(200, json.Length));
            }
            message += " (" + where + ")";
            if (status == 404 && code != "no_path")
                return new SessionLostException(status, code, message + "; start the session again");
            return new ClientException(status, code, message, RetryAfter);
        }

        // The string under a key of a flat JSON object; empty where there is none. A quote inside a JSON string is
        // escaped, so "key" with its quotes cannot be found inside one.
        static string JsonString(string json, string key)
        {
            int at = json.IndexOf("\"" + key + "\"", StringComparison.Ordinal);
            if (at < 0) return "";
            for (at += key.Length + 2; at < json.Length && " \t\r\n:".IndexOf(json[at]) >= 0; at++) { }
            if (at >= json.Length || json[at] != '"') return "";
            var text = new StringBuilder();
            for (at++; at < json.Length && json[at] != '"'; at++)
            {
                if (json[at] != '\\' || at + 1 >= json.Length)
                {
                    text.Append(json[at]);
                    continue;
                }
                char c = json[++at];
                int known = "bfnrt".IndexOf(c), number;
                if (known >= 0)
                {
                    text.Append("\b\f\n\r\t"[known]);
                }
                else if (c == 'u' && at + 4 < json.Length && int.TryParse(json.Substring(at + 1, 4),
                    NumberStyles.AllowHexSpecifier, null, out number))
                {
                    text.Append((char)number);
                    at += 4;
                }
                else
                {
                    text.Append(c);
                }
            }
            return text.ToString();
        }
    }

    abstract class ReplyReader
    {
        protected const int MaxHead = 64 * 1024, MaxReply = 1 << 30;
        protected byte[] Buffer = new byte[4096];
        protected int Count;

        /// Bytes came; the reply if it is whole now, else null.
        public Reply Feed(byte[] data, int n)
        {
            if (Count + n > Buffer.Length) Array.Resize(ref Buffer, (int)Math.Min(2L * (Count + n), int.MaxValue - 64));
            System.Buffer.BlockCopy(data, 0, Buffer, Count, n);
            Count += n;
            return Read();
        }

        protected abstract Reply Read();

        /// The connection ended; the reply that this completes, else null.
        public virtual Reply End()
        {
            return null;
        }

        protected byte[] Take(int size)
        {
            var taken = new byte[size];
            System.Buffer.BlockCopy(Buffer, 0, taken, 0, size);
            Drop(size);
            return taken;
        }

        protected void Drop(int size)
        {
            Count -= size;
            System.Buffer.BlockCopy(Buffer, size, Buffer, 0, Count);
        }

        protected static ClientException Bad(string message)
        {
            return new ConnectionLostException("bad_reply", message);
        }
    }

    sealed class TcpReader : ReplyReader
    {
        protected override Reply Read()
        {
            if (Count < 24) return null;
            long session = Int64(0), body = Int64(8);
            if (Encoding.ASCII.GetString(Buffer, 0, 5) == "HTTP/")
                throw Bad("expected a framed TCP reply, got HTTP: use tcp: false, or switch use_tcp on in the service");
            if (session < 0 || session > MaxHead || body < 0 || body > MaxReply)
                throw Bad("expected the lengths of a framed reply, got " + session + " and " + body);
            if (Count < 24 + session + body) return null;
            var reply = new Reply { Time = Int64(16) };
            Drop(24);
            reply.Session = Encoding.UTF8.GetString(Take((int)session));
            reply.Body = Take((int)body);
            reply.Keep = Count == 0; // else it is out of step
            return reply;
        }

        long Int64(int at)
        {
            long value = 0;
            for (int i = 0; i < 8; i++) value = (value << 8) | Buffer[at + i];
            return value;
        }
    }

    sealed class HttpReader : ReplyReader
    {
        Reply reply;
        int length; // below 0: until the connection closes
        bool chunked, trailer;
        MemoryStream chunks;

        protected override Reply Read()
        {
            while (reply == null)
            {
                int end = Find("\r\n\r\n");
                if (end < 0)
                {
                    string start = Encoding.ASCII.GetString(Buffer, 0, Math.Min(Count, 7));
                    if (Count > MaxHead || !"HTTP/1.".StartsWith(start, StringComparison.Ordinal))
                        throw Bad("expected an HTTP/1.x reply, got '" + start + "'");
                    return null;
                }
                ReadHead(Encoding.UTF8.GetString(Buffer, 0, end).Split(new[] { "\r\n" }, StringSplitOptions.None));
                Drop(end + 4);
            }
            if (chunked) return ReadChunks() ? Finish(chunks.ToArray()) : null;
            if (length < 0 || Count < length) return null;
            return Finish(Take(length));
        }

        public override Reply End()
        {
            return reply != null && !chunked && length < 0 ? Finish(Take(Count)) : null;
        }

        Reply Finish(byte[] body)
        {
            Reply whole = reply;
            whole.Body = body;
            whole.Keep = whole.Keep && Count == 0; // else it is out of step
            reply = null;
            return whole;
        }

        void ReadHead(string[] lines)
        {
            int status;
            string first = lines[0];
            if (!first.StartsWith("HTTP/1.", StringComparison.Ordinal) || first.Length < 12 ||
                !int.TryParse(first.Substring(9, 3), out status))
                throw Bad("expected an HTTP/1.x status line, got '" + first + "'");
            if (status < 200) return; // interim
            reply = new Reply { Status = status, Keep = first[7] != '0' };
            length = status == 204 || status == 304 ? 0 : -1;
            chunked = trailer = false;
            for (int i = 1; i < lines.Length; i++)
            {
                int colon = lines[i].IndexOf(':');
                if (colon < 0) continue;
                string name = lines[i].Substring(0, colon).Trim().ToLowerInvariant();
                string value = lines[i].Substring(colon + 1).Trim().ToLowerInvariant();
                if (name == "content-length")
                {
                    if (!int.TryParse(value, NumberStyles.None, null, out length) || length > MaxReply)
                        throw Bad("expected a Content-Length up to 1 GiB, got '" + value + "'");
                }
                else if (name == "transfer-encoding" && value == "chunked")
                {
                    chunked = true;
                    chunks = new MemoryStream();
                }
                else if (name == "connection")
                {
                    reply.Keep = value == "keep-alive" || (reply.Keep && value != "close");
                }
                else if (name == "retry-after")
                {
                    int seconds;
                    if (int.TryParse(value, out seconds)) reply.RetryAfter = seconds;
                }
                else if (name == "session_secret" || name == "session-secret")
                {
                    reply.Secret = value;
                }
            }
            if (length < 0 && !chunked) reply.Keep = false;
        }

        bool ReadChunks()
        {
            while (true)
            {
                int end = Find("\r\n"), size;
                if (end < 0)
                {
                    if (Count > MaxHead) throw Bad("expected the size of a chunk");
                    return false;
                }
                string line = Encoding.ASCII.GetString(Buffer, 0, end);
                if (trailer)
                {
                    Drop(end + 2);
                    if (line == "") return true;
                    continue;
                }
                string number = line.Split(';')[0].Trim();
                if (!int.TryParse(number, NumberStyles.AllowHexSpecifier, null, out size) || size < 0 ||
                    chunks.Length + size > MaxReply)
                    throw Bad("expected the size of a chunk, got '" + line + "'");
                trailer = size == 0;
                if (!trailer && Count < end + 2 + size + 2) return false;
                Drop(end + 2);
                if (trailer) continue;
                chunks.Write(Buffer, 0, size);
                Drop(size + 2);
            }
        }

        int Find(string what)
        {
            for (int i = 0; i + what.Length <= Count; i++)
            {
                int j = 0;
                while (j < what.Length && Buffer[i + j] == what[j]) j++;
                if (j == what.Length) return i;
            }
            return -1;
        }
    }
}
