#!/bin/sh
# The folder .arm for `make arm`: Python of Debian and packages of PyPI for ARM, and .arm/bin/python, which runs them by
# QEMU. It needs apt-get of Debian, which downloads, but not root: nothing is installed outside of the folder.
set -e
arm=$PWD/.arm here=$(dpkg --print-architecture)
programs=$arm/debian/usr/bin
mkdir -p "$arm/bin" "$arm/apt/lists/partial" "$arm/apt/archives/partial"
: >"$arm/apt/status"  # what apt takes for installed: nothing
cat >"$arm/apt/conf" <<END
APT { Architecture "arm64"; Architectures { "arm64"; "$here"; }; Install-Recommends "0"; Sandbox::User ""; };
Dir { State "$arm/apt"; State::status "$arm/apt/status"; Cache "$arm/apt"; };
END
export APT_CONFIG="$arm/apt/conf"
apt-get -q update
apt-get -q -y --download-only install "qemu-user-static:$here" python3-venv libgomp1 libstdc++6
for package in "$arm"/apt/archives/*.deb; do
    dpkg-deb -x "$package" "$arm/debian"
done
echo "home = $programs" >"$arm/pyvenv.cfg"
# named as this script, Python takes it for itself: sys.executable starts the emulation anew
cat >"$arm/bin/python" <<END
#!/bin/sh
exec "$programs/qemu-aarch64-static" -L "$arm/debian" -0 "\$0" "$programs/python3" "\$@"
END
chmod +x "$arm/bin/python"
# the newest wheel of torch for ARM on PyPI that is for CPUs
sed 's/^torch==.*/torch==2.10.0/' requirements.txt >"$arm/requirements.txt"
grep -E '^(pytest|hypothesis)>' requirements-dev.txt >>"$arm/requirements.txt"
"$arm/bin/python" -m ensurepip
"$arm/bin/python" -m pip install -q --no-compile -r "$arm/requirements.txt"
rm -r "$arm/apt"
