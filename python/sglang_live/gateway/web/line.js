// Lines to the server: a WebRTC call, which carries the sound itself, or a socket, on which sound is
// events. Both have send(text), close(), isOpen, and wasOpen: whether the server was reached.

const CHANNEL = "oai-events";
// From the answer of the server to an open channel. Where UDP does not pass, nothing says so.
const CONNECT_MS = 4000;
const NO_WEBRTC = 501; // the server lacks it
// Close codes that are intended: end, refusal, full server. Others are failures of the network.
const ON_PURPOSE = [1000, 1008, 1013];

export class Ended extends Error {
  constructor(message, isFinal) {
    super(message);
    this.isFinal = isFinal; // another attempt would fail too
  }
}

let isBlocked = false; // a call has failed to connect, so the next one would, too

// A line by WebRTC if it can be had, else a socket. As it opens, its events come, so that `take`
// gets it before it does.
//   call: {offer(sdp): the request's {path, headers, body}, answer(response): its {sdp, path}}.
//   path: of the socket. take(line). onOpen(), onEvent(event), onEnd(Ended).
export async function openLine({ audio, access, call, path, take, ...handlers }) {
  if (audio && globalThis.RTCPeerConnection && !isBlocked) {
    const line = new CallLine(handlers);
    take(line);
    try {
      await line.open(audio, access, call);
      return;
    } catch (error) {
      if (line.isClosed) throw error;
      line.close();
      isBlocked = line.isHopeless;
    }
  }
  take(new SocketLine(path, access, handlers));
}

export class SocketLine {
  name = "WebSocket";
  carriesSound = false;
  wasOpen = false;

  constructor(path, { protocols }, { onOpen, onEvent, onEnd }) {
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    this.socket = new WebSocket(`${scheme}://${location.host}${path}`, protocols);
    this.socket.addEventListener("message", ({ data }) => onEvent(JSON.parse(data)));
    this.socket.addEventListener("open", () => {
      this.wasOpen = true;
      onOpen?.();
    });
    this.socket.addEventListener("close", ({ code, reason }) => {
      const why = this.wasOpen ? reason || `connection lost (${code})` : "the server is unreachable";
      onEnd(new Ended(why, ON_PURPOSE.includes(code)));
    });
  }

  get isOpen() {
    return this.socket.readyState === WebSocket.OPEN;
  }

  send(text) {
    if (this.isOpen) this.socket.send(text);
  }

  close() {
    this.socket.close();
  }

  async quality() {
    return null; // what is lost on the way is sent again
  }
}

class CallLine {
  name = "WebRTC";
  carriesSound = true;
  wasOpen = false;
  isHopeless = false; // another attempt would fail too
  isClosed = false;

  constructor({ onEvent, onEnd }) {
    this.onEvent = onEvent;
    this.onEnd = onEnd;
    this.counts = { received: 0, lost: 0 };
  }

  get isOpen() {
    return this.channel?.readyState === "open";
  }

  async open(audio, { headers }, { offer, answer }) {
    const peer = (this.peer = new RTCPeerConnection());
    const outgoing = audio.outgoing();
    peer.addTrack(outgoing.getAudioTracks()[0], outgoing);
    peer.addEventListener("track", ({ streams }) => audio.hear(streams[0]));
    const channel = (this.channel = peer.createDataChannel(CHANNEL));
    channel.addEventListener("message", ({ data }) => this.onEvent(JSON.parse(data)));
    const opened = new Promise((done, fail) => {
      channel.addEventListener("open", done);
      channel.addEventListener("close", () => fail(new Error("the call is over")));
      peer.addEventListener("connectionstatechange", () => {
        if (peer.connectionState !== "failed") return;
        fail(new Error("no connection"));
        this.over(new Ended("connection lost", false));
      });
      channel.addEventListener("close", () => this.over(new Ended("the server has ended the call", true)));
    });
    opened.catch(() => {}); // before it is awaited
    await peer.setLocalDescription();
    const { path, ...request } = offer(peer.localDescription.sdp);
    const response = await fetch(path, { method: "POST", ...request, headers: { ...request.headers, ...headers } });
    this.isHopeless = response.ok || response.status === NO_WEBRTC;
    if (!response.ok) throw new Error(`the server returned status ${response.status}`);
    const answered = await answer(response);
    this.hangUp = () => fetch(`${answered.path}/hangup`, { method: "POST", headers, keepalive: true });
    if (this.isClosed) await this.hangUp();
    await peer.setRemoteDescription({ type: "answer", sdp: answered.sdp });
    const late = new Promise((_, fail) => setTimeout(() => fail(new Error("no connection")), CONNECT_MS));
    try {
      await Promise.race([opened, late]);
    } catch (error) {
      // Its place may be the last one, which the socket needs.
      await this.hangUp().catch(() => {});
      throw error;
    }
    this.wasOpen = true;
  }

  over(why) {
    if (this.wasOpen) this.onEnd(why);
    this.wasOpen = false;
  }

  send(text) {
    if (this.isOpen) this.channel.send(text);
  }

  close() {
    // The server would notice after seconds that nothing comes.
    if (this.wasOpen) this.hangUp().catch(() => {});
    this.isClosed = true;
    this.wasOpen = false;
    this.peer?.close();
  }

  // Since the last call: the share of packets that were lost, of both directions the worse one;
  // the jitter; and how much the browser holds back because of it.
  async quality() {
    const found = { lost: 0, jitterMs: 0, heldMs: null };
    for (const report of (await this.peer.getStats()).values()) {
      if (report.type === "remote-inbound-rtp") {
        found.lost = Math.max(found.lost, report.fractionLost ?? 0);
        found.jitterMs = Math.max(found.jitterMs, 1000 * (report.jitter ?? 0));
      } else if (report.type === "inbound-rtp" && report.kind === "audio") {
        const lost = report.packetsLost - this.counts.lost;
        const received = report.packetsReceived - this.counts.received;
        this.counts = { received: report.packetsReceived, lost: report.packetsLost };
        if (lost > 0) found.lost = Math.max(found.lost, lost / (lost + received));
        found.jitterMs = Math.max(found.jitterMs, 1000 * report.jitter);
        const { jitterBufferDelay: delayS, jitterBufferEmittedCount: n } = report;
        if (n) found.heldMs = (1000 * delayS) / n;
      }
    }
    return found;
  }
}
