// A client that is told what to do, line by line on its standard input; the tests play it against servers that
// misbehave. The orders are those of clients/cpp/driver.cpp; `async` before an order uses the awaited form of the call.

using System;
using System.Linq;
using System.Net.Security;
using System.Security.Cryptography.X509Certificates;
using System.Text;
using System.Threading.Tasks;

static class Driver
{
    static Bray.Client client;

    static string Text(string word)
    {
        return word == "-" ? "" : word;
    }

    static byte[] Bytes(string hex)
    {
        if (hex.StartsWith("x*")) return Encoding.ASCII.GetBytes(new string('x', int.Parse(hex.Substring(2))));
        var bytes = new byte[hex == "-" ? 0 : hex.Length / 2];
        for (int i = 0; i < bytes.Length; i++) bytes[i] = Convert.ToByte(hex.Substring(2 * i, 2), 16);
        return bytes;
    }

    static string Hex(byte[] bytes)
    {
        var text = new StringBuilder();
        foreach (byte b in bytes) text.Append(b.ToString("x2"));
        return text.Length == 0 ? "-" : text.ToString();
    }

    // Trusts one certificate (DER or PEM) and nothing else.
    static RemoteCertificateValidationCallback Trust(string file)
    {
        byte[] known = new X509Certificate2(file).GetCertHash();
        return (sender, certificate, chain, errors) => certificate != null && certificate.GetCertHash().SequenceEqual(known);
    }

    static byte[] Obey(string line)
    {
        string[] w = line.Split(' ');
        if (w[0] == "async") return ObeyAsync(line.Substring(6).Split(' ')).GetAwaiter().GetResult();
        bool again = w[w.Length - 1] == "idempotent";
        switch (w[0])
        {
            case "new":
                if (client != null) client.Dispose();
                double timeout = double.Parse(w[4], System.Globalization.CultureInfo.InvariantCulture);
                bool tls = w.Length > 9;
                client = new Bray.Client(w[1], int.Parse(w[2]), timeout, w[3] == "tcp", Text(w[6]), Text(w[7]), Text(w[8]),
                    int.Parse(w[5]), tls, tls ? Trust(w[9]) : null);
                return new byte[0];
            case "start": return client.Start(Text(w[1]), Text(w[2]), Bytes(w[3]));
            case "tick": return client.Tick(Bytes(w[1]), again);
            case "end": return client.End(Bytes(w[1]));
            case "step": return client.Step(Bytes(w[1]), again);
            case "session": return Encoding.UTF8.GetBytes(client.Session);
            case "bench":
                byte[] data = Bytes(w[2]);
                var watch = System.Diagnostics.Stopwatch.StartNew();
                for (int i = 0; i < int.Parse(w[1]); i++) client.Tick(data);
                return Encoding.UTF8.GetBytes(watch.Elapsed.TotalSeconds.ToString());
            default: throw new ArgumentException("unknown order " + w[0]);
        }
    }

    static async Task<byte[]> ObeyAsync(string[] w)
    {
        bool again = w[w.Length - 1] == "idempotent";
        switch (w[0])
        {
            case "start": return await client.StartAsync(Text(w[1]), Text(w[2]), Bytes(w[3]));
            case "tick": return await client.TickAsync(Bytes(w[1]), again);
            case "end": return await client.EndAsync(Bytes(w[1]));
            case "step": return await client.StepAsync(Bytes(w[1]), again);
            default: throw new ArgumentException("unknown order " + w[0]);
        }
    }

    static void Main()
    {
        Console.OutputEncoding = new UTF8Encoding(false);
        Console.InputEncoding = new UTF8Encoding(false);
        string line;
        while ((line = Console.ReadLine()) != null)
        {
            try
            {
                Console.WriteLine("ok " + Hex(Obey(line)));
            }
            catch (Bray.ClientException error)
            {
                string kind = error.GetType().Name.Replace("Exception", "").Replace("Client", "ClientError");
                Console.WriteLine("error " + kind + " " + error.Status + " " + error.Code + " " + error.Message);
            }
            catch (ArgumentException error)
            {
                Console.WriteLine("error InvalidArgument 0 - " + error.Message);
            }
            Console.Out.Flush();
        }
        if (client != null) client.Dispose();
    }
}
