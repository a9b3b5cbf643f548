#include "report/svg.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace ferry::tools {

namespace {

int to_byte(double share) { return static_cast<int>(std::lround(std::clamp(share, 0.0, 1.0) * 255.0)); }

/// Two decimals are finer than any screen.
std::string number(double value) { return fmt::format("{:.6g}", std::round(value * 100.0) / 100.0); }

const char* name_of(Anchor anchor) {
  switch (anchor) {
    case Anchor::kStart:
      return "start";
    case Anchor::kMiddle:
      return "middle";
    case Anchor::kEnd:
      return "end";
  }
  return "start";
}

}  // namespace

std::string to_hex(const Color& color) {
  return fmt::format("#{:02x}{:02x}{:02x}", to_byte(color.red), to_byte(color.green), to_byte(color.blue));
}

Color mix(const Color& a, const Color& b, double share) {
  return {std::lerp(a.red, b.red, share), std::lerp(a.green, b.green, share), std::lerp(a.blue, b.blue, share)};
}

Color from_hsl(double hue, double saturation, double lightness) {
  const double reach = saturation * std::min(lightness, 1.0 - lightness);
  const auto channel = [&](double offset) {
    const double k = std::fmod(offset + hue / 30.0, 12.0);
    return lightness - reach * std::max(-1.0, std::min({k - 3.0, 9.0 - k, 1.0}));
  };
  return {channel(0.0), channel(8.0), channel(4.0)};
}

std::string xml_escape(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      case '\'':
        escaped += "&#39;";
        break;
      default:
        escaped += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
    }
  }
  return escaped;
}

Svg::Svg(double width, double height, std::string_view title) {
  body_ = fmt::format(
      "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" "
      "font-family=\"system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif\">\n<title>{2}</title>\n",
      number(width), number(height), xml_escape(title));
  rect({0.0, 0.0, width, height}, {.fill = "#ffffff"});
}

void Svg::rect(const Box& box, const Paint& paint) {
  std::string attributes;
  if (!paint.kind.empty()) attributes += fmt::format(" class=\"{}\"", xml_escape(paint.kind));
  if (paint.radius > 0.0) attributes += fmt::format(" rx=\"{}\"", number(paint.radius));
  if (paint.stroke != "none") {
    attributes +=
        fmt::format(" stroke=\"{}\" stroke-width=\"{}\"", xml_escape(paint.stroke), number(paint.stroke_width));
  }
  body_ += fmt::format("<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"{}\"{}", number(box.x), number(box.y),
                       number(box.width), number(box.height), xml_escape(paint.fill), attributes);
  body_ += paint.hover.empty() ? "/>\n" : fmt::format("><title>{}</title></rect>\n", xml_escape(paint.hover));
}

void Svg::line(double x1, double y1, double x2, double y2, std::string_view stroke, std::string_view dashes) {
  body_ += fmt::format("<line x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\" stroke=\"{}\"{}/>\n", number(x1), number(y1),
                       number(x2), number(y2), xml_escape(stroke),
                       dashes.empty() ? std::string() : fmt::format(" stroke-dasharray=\"{}\"", xml_escape(dashes)));
}

void Svg::text(double x, double y, std::string_view text, const TextStyle& style) {
  body_ +=
      fmt::format("<text x=\"{0}\" y=\"{1}\" font-size=\"{2}\" fill=\"{3}\" text-anchor=\"{4}\"{5}{6}>{7}</text>\n",
                  number(x), number(y), number(style.size), xml_escape(style.fill), name_of(style.anchor),
                  style.bold ? " font-weight=\"600\"" : "",
                  style.rotation == 0.0
                      ? std::string()
                      : fmt::format(" transform=\"rotate({} {} {})\"", number(style.rotation), number(x), number(y)),
                  xml_escape(text));
}

}  // namespace ferry::tools
