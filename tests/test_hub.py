"""Uploads to a stand-in of the Hugging Face Hub on this machine."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from sebulba_runs import finish, last_line, launch, tiny

pytest.importorskip("huggingface_hub", reason="requirements/requirements-hub.txt is not installed")


class StandIn(BaseHTTPRequestHandler):
    """What the Hub answers when a repository is made and files are committed to it; it keeps them in ``server``."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server = self.server
        if self.headers.get("Authorization") != "Bearer hf_right":
            return self.answer(401, {"error": "Invalid username or password."})
        if self.path == "/api/validate-yaml":  # of the model card
            return self.answer(200, {"errors": [], "warnings": []})
        if self.path == "/api/repos/create":
            told = json.loads(body)
            server.repo = f"{told.get('organization') or 'me'}/{told['name']}"
            return self.answer(200, {"url": f"http://{self.headers['Host']}/{server.repo}", "name": server.repo})
        if self.path == f"/api/models/{server.repo}/preupload/main":
            files = [{"path": f["path"], "uploadMode": "regular"} for f in json.loads(body)["files"]]
            return self.answer(200, {"files": [{**f, "shouldIgnore": False} for f in files]})
        if self.path.startswith(f"/api/models/{server.repo}/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            where = f"http://{self.headers['Host']}/{server.repo}/commit/1"
            return self.answer(200, {"success": True, "commitOid": "1", "commitUrl": where, "hookOutput": ""})
        return self.answer(404, {"error": f"no such address {self.path}"})

    def do_GET(self):
        self.answer(200, {"lfs": [], "text": []})

    def answer(self, code, content):
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    server.repo, server.files = "none/yet", {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def upload(tmp_path, hub, token, *flags):
    environ = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path / "hf")}
    environ |= {"HF_TOKEN": token, "NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    process = launch("cleanba_ppo", *tiny(tmp_path, "--total-timesteps=512", "--upload-model", *flags), environ=environ)
    return finish(process)


@pytest.mark.long
def test_a_model_is_uploaded(tmp_path, hub):
    code, out = upload(tmp_path, hub, "hf_right", "--hf-entity=us")
    assert code == 0, out
    assert hub.repo == "us/CartPole-v1-cleanba_ppo-seed1" and hub.repo in last_line(out)
    assert set(hub.files) == {"model.pt", "args.json", "summary.json", "metrics.jsonl", "README.md"}
    assert hub.files["model.pt"] == (tmp_path / "run" / "model.pt").read_bytes()
    assert "512 environment steps" in hub.files["README.md"].decode()


@pytest.mark.long
def test_a_refused_upload_keeps_the_model(tmp_path, hub):
    code, out = upload(tmp_path, hub, "hf_wrong")
    assert code == 1 and "RuntimeError: --upload-model: " in last_line(out)
    assert (tmp_path / "run" / "model.pt").exists() and not hub.files


def test_nobody_logged_in_is_told_at_once(tmp_path, hub):
    code, out = upload(tmp_path, hub, "")
    assert code == 2 and out.count("\n") == 1
    assert "--upload-model: nobody is logged in" in out and not (tmp_path / "run").exists()
